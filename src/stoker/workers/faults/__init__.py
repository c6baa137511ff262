"""Faults: samples that fail or hang, workers that die, and a run that goes on. docs/faults.md is for its users."""
