"""Tuning: settings found by measuring, never while training. A client of the road; no stage imports it."""

KNOBS = ("num_workers", "worker_method", "prefetch_factor", "pin_memory", "persistent_workers")
ALL_KNOBS = (
    *KNOBS,
    "batch_size",
    "cache",
)  # the last two for who asks: training may want another batch, memory is dear
BUDGET_S = 12.0  # seconds that tuning may take
