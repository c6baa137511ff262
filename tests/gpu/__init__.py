"""Tests that want a CUDA device; skipped without one. ``make bench-gpu`` runs them, too."""
