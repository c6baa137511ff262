"""Benchmarks: stoker against torch's DataLoader, alternated in one run. ``python -m benchmarks run``; see README.md."""
