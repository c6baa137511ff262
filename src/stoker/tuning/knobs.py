"""The settings that ``stoker tune`` may change, by torch's names, and how long it may take."""

KNOBS = ("num_workers", "worker_method", "prefetch_factor", "pin_memory")
BUDGET_S = 12.0  # seconds that tuning may take
