"""The ``data/*`` numbers in TensorBoard, Weights & Biases and MLflow themselves, and what happens where they fail."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .harness import HERE, SOURCE

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="loaders are watched on Linux only"),
    pytest.mark.scripts,
    pytest.mark.timeout(300),
]
NUMBERS = {"data/wait_pct", "data/wait_s", "data/samples_per_s", "data/workers", "data/failed_samples"}
VERDICTS = ("healthy", "input-bound")


def run(tmp_path: Path, name: str, *args: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """One of the scripts, with a home of its own, no key, and no network that it could reach."""
    known = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "MLFLOW"))}
    env = known | {
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONPATH": str(SOURCE),
        "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlruns",
        "HF_HUB_OFFLINE": "1",
    }
    line = [sys.executable, *before, str(HERE / "loggers" / name), *args]
    return subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=250)


def printed(p: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert p.returncode == 0, p.stderr
    found = json.loads(p.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def events(folder: Path) -> tuple[dict[str, list[float]], dict[str, str]]:
    """The scalars and texts in a folder of TensorBoard's."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    texts = {t: found.Tensors(t)[-1].tensor_proto.string_val[0].decode() for t in found.Tags()["tensors"]}
    return {t: [e.value for e in found.Scalars(t)] for t in found.Tags()["scalars"]}, texts


@pytest.mark.parametrize("before", [(), ("-m", "stoker", "run", "--apply")])
@pytest.mark.parametrize("devices", [1, 2])
def test_lightning(devices: int, before: tuple[str, ...], tmp_path: Path) -> None:
    found = printed(run(tmp_path, "lightning_loggers.py", str(devices), before=before))
    numbers = NUMBERS | ({"data/wait_rank"} if devices > 1 else set())
    scalars, texts = events(tmp_path / found["tensorboard"])
    assert numbers <= scalars.keys()
    steps = 32 // devices
    assert len(scalars["data/wait_pct"]) == len(scalars["loss"]) == steps // 4
    assert all(0 <= x <= 100 for x in scalars["data/wait_pct"])
    assert texts["data/verdict/text_summary"] in VERDICTS
    assert numbers | {"data/verdict"} <= found["wandb"].keys()
    assert found["wandb"]["data/verdict"] in VERDICTS
    assert numbers <= found["mlflow"].keys()
    assert found["tags"]["data/verdict"] in VERDICTS
    with open(tmp_path / found["csv"] / "metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["data/wait_pct"]]
    assert len(rows) == steps // 4
    assert {row["data/verdict"] for row in rows} <= {"-1", "0", "1"}


def test_transformers(tmp_path: Path) -> None:
    found = printed(run(tmp_path, "hf_trainer.py", "tensorboard", "wandb"))
    logs = [row for row in found["history"] if "loss" in row]
    assert len(logs) == 8
    for row in logs:
        assert row.keys() >= NUMBERS
        assert row["data/verdict"] in ("unknown", *VERDICTS)
    (folder,) = {path.parent for path in (tmp_path / "out").rglob("events.out.*")}
    scalars, texts = events(folder)
    assert {f"train/{key}" for key in NUMBERS} <= scalars.keys()
    assert len(scalars["train/data/wait_pct"]) == 8
    assert texts["train/data/verdict/text_summary"] in VERDICTS
    assert {f"train/{key}" for key in NUMBERS} <= found["wandb"].keys()


def test_transformers_where_one_takes_no_text(tmp_path: Path) -> None:
    found = printed(p := run(tmp_path, "hf_trainer.py", "tensorboard", "mlflow"))
    assert NUMBERS | {"data/verdict"} <= found["mlflow"].keys()
    assert found["mlflow"]["data/verdict"] in (0, 1)
    assert "attempting to log a value" not in p.stderr


def test_a_loop_with_tensorboard(tmp_path: Path) -> None:
    p = run(tmp_path, "own_loop.py", "tensorboard")
    assert p.stdout == "trained\n", p.stderr
    scalars, texts = events(tmp_path / "tensorboard")
    assert scalars.keys() >= NUMBERS
    assert texts["data/verdict/text_summary"] in VERDICTS


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_loop_with(name: str, tmp_path: Path) -> None:
    p = run(tmp_path, "own_loop.py", name)
    assert p.stdout == "trained\n", p.stderr
    assert "StokerWarning" not in p.stderr


FAILURES = {
    "unwritable": "Not a directory",
    "no_key": "UsageError",
    "no_network": "Error",
    "no_server": "MlflowException",
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_cannot_be_opened_is_one_sentence(name: str, tmp_path: Path) -> None:
    p = run(tmp_path, "own_loop.py", name)
    assert p.returncode == 0, p.stderr
    assert p.stdout.splitlines()[-1] == "trained"
    said = [line for line in p.stderr.splitlines() if "StokerWarning: data/* is not logged:" in line]
    assert len(said) == 1, p.stderr
    assert FAILURES[name] in said[0]
