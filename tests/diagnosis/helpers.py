"""What several tests of the diagnosis share: a made-up loader, and what the doctor finds in it."""

from __future__ import annotations

from typing import Any

import msgspec

from stoker.diagnosis.doctor.verdict import diagnose
from stoker.diagnosis.report.schema import Around, LoaderReport

NOT_HERE = 77  # the exit code of a script that cannot plant its cause on this machine


def fields(**changes: Any) -> dict[str, Any]:
    """A loader that is fine: two workers, busy a third of the time, 100 batches of 10 ms."""
    spread = {"count": 100, "median_s": 0.006, "p95_s": 0.007, "slow_share": 0.0, "slow_count": 0}
    out: dict[str, Any] = {
        "name": "train.py:3",
        "batches": 100,
        "samples": 800,
        "epochs": 1,
        "ended": 1,
        "made": 1,
        "at_once": 1,
        "wait_s": 0.01,
        "step_s": 1.0,
        "between_s": 0.0,
        "samples_per_s": 800.0,
        "settings": {
            "num_workers": 2,
            "prefetch_factor": 2,
            "engine": "torch",
            "worker_method": "process",
            "persistent_workers": False,
            "pin_memory": False,
        },
        "stages": {
            "fetch": {"self_s": 0.6},
            "collate": {"self_s": 0.05},
            "transport": {"self_s": 0.0},
            "worker": {"cpu_s": 0.6, "tasks": 100},
            "consumer": {"cpu_s": 0.1},
            "startup": {"wait_s": 0.005},
        },
        "loop_s": 1.01,
        "filled_epochs": 0,
        "epoch_s": {},
        "cache": {},
        "memory": {"worker_pss": [1 << 26, 1 << 26], "batch_bytes": 0, "own": []},
        "steps": {**spread, "median_s": 0.01, "p95_s": 0.011},
        "waits": {**spread, "median_s": 1e-5, "p95_s": 2e-5},
        "tasks": {**spread, "slow_samples": {}},
        "by_epoch": [],
        "over_time": [],
        "decisions": [],
        "where": [],
        "looks": 0,
        "device": {},
        "kernel": {
            "delay_ns": 0,
            "stored": 0,
            "system_ns": 0,
            "cpu_ns": 600_000_000,
            "seconds": 2.0,
        },
    }
    for key, value in changes.items():
        out[key] = {**out[key], **value} if isinstance(out[key], dict) else value
    return out


def entry(**changes: Any) -> LoaderReport:
    return msgspec.convert(fields(**changes), LoaderReport)


def causes(
    *,
    around: dict[str, Any] | None = None,
    gpus: int = 0,
    cores: int = 2,
    cuda: bool = False,
    memory_granted: int = 0,
    **changes: Any,
) -> list[str]:
    return [
        f.cause
        for f in diagnose([entry(**changes)], cores, cuda, msgspec.convert(around or {}, Around), gpus, memory_granted)[
            1
        ]
    ]
