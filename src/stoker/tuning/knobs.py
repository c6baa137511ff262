"""The settings that ``stoker tune`` may change, by torch's names, and how long it may take."""

KNOBS = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
ALL_KNOBS = (*KNOBS, "batch_size")  # the last only if asked for: another batch size changes the training
BUDGET_S = 12.0  # seconds that tuning may take
