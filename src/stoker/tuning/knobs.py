"""The settings that ``stoker tune`` may change, by torch's names, and how long it may take."""

KNOBS = ("num_workers", "prefetch_factor", "pin_memory")
ALL_KNOBS = (*KNOBS, "batch_size")  # the last one changes the training, so the user has to ask for it
BUDGET_S = 12.0  # seconds that tuning may take
