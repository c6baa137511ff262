"""The settings that ``stoker tune`` may change, by torch's names, and how long it may take."""

KNOBS = ("num_workers", "prefetch_factor", "pin_memory")
BUDGET_S = 12.0  # seconds that tuning may take
