"""``DataMonitor``: the numbers of real loaders, of one rank and of several, and what happens where something fails."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

import stoker
from stoker.core.errors import UsageError
from stoker.diagnosis.watch import patch
from stoker.integrations.monitor import DataMonitor
from tests.commands.helpers import forked_stoker

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="loaders are watched on Linux only")


class Slow(Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> int:
        time.sleep(0.001)
        if i == 7:
            raise ValueError("broken")
        return i


class Fast(Slow):
    def __getitem__(self, i: int) -> int:
        return i


class Writer:
    """Keeps what it gets, as a SummaryWriter does; fails after ``most``."""

    def __init__(self, most: int = 10**6) -> None:
        self.got: dict[str, list[Any]] = {}
        self.most = most

    def add_scalar(self, key: str, value: float, step: int) -> None:
        self.most -= 1
        if self.most < 0:
            raise OSError("No space left on device\nmore")
        self.got.setdefault(key, []).append((step, value))

    add_text = add_scalar


@pytest.mark.parametrize("cls", [DataLoader, stoker.DataLoader])
def test_a_loop_that_only_waits_and_one_that_hardly_does(cls: Any) -> None:
    with DataMonitor() as monitor:
        loader = cls(Fast(), batch_size=4, num_workers=1)
        for _ in loader:
            time.sleep(0.002)
        first = monitor.read()
        assert first["data/workers"] == 1
        assert first["data/verdict"] in ("healthy", "input-bound")
        assert first["data/failed_samples"] == 0
        assert monitor.read() == {}, "nothing came since"
        slow = cls(torch_range(), batch_size=1, collate_fn=sleepy)
        for _ in slow:
            pass
        later = monitor.read()
    assert later["data/wait_pct"] > first["data/wait_pct"]
    assert later["data/workers"] == 0
    assert "data/worker_busy_pct" not in later


def torch_range() -> Any:
    return range(20)


def sleepy(samples: list[int]) -> int:
    time.sleep(0.002)
    return samples[0]


def test_failed_samples_and_the_logger_that_gets_them() -> None:
    writer = Writer()
    with DataMonitor(lambda: writer) as monitor, warnings.catch_warnings():
        warnings.simplefilter("ignore", stoker.StokerWarning)
        for _ in stoker.DataLoader(Slow(), batch_size=4, on_error="skip", quarantine=None):
            pass
        monitor.log(3)
    assert writer.got["data/failed_samples"] == [(3, 1)]
    assert writer.got["data/verdict"] == [(3, "input-bound")]


def test_what_fails_is_said_once_and_the_loop_goes_on() -> None:
    loader = DataLoader(Fast(), batch_size=4)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with DataMonitor(Writer(most=2)) as monitor:
            monitor.log()
            monitor.log()  # nothing was seen yet: said once
            for step in range(3):
                assert len(list(loader)) == 10
                monitor.log(step)
        with DataMonitor(lambda: open("/proc/self/no/such/folder")) as monitor:
            assert len(list(loader)) == 10
            monitor.log()
            assert monitor.read() == {}
    assert [str(w.message) for w in said] == [
        "no batch of a DataLoader was seen yet, so there are no data/* numbers to log",
        "data/* is no longer logged: OSError: No space left on device",
        "data/* is not logged: FileNotFoundError: [Errno 2] No such file or directory: '/proc/self/no/such/folder'",
    ]


def test_what_is_no_logger_is_refused() -> None:
    with pytest.raises(UsageError, match=r"Fast is not a supported logger\. Pass a TensorBoard SummaryWriter"):
        DataMonitor(Fast())
    assert not patch._users


def test_a_session_and_monitors_at_once() -> None:
    loader = DataLoader(Fast(), batch_size=4)
    with stoker.watch() as w:
        with DataMonitor() as monitor:
            assert len(list(loader)) == 10
            assert monitor.read()
        assert len(list(loader)) == 10
    assert w.report is not None
    assert [e["batches"] for e in w.report["loaders"]] == [20]
    with DataMonitor() as monitor:
        for _ in loader:
            time.sleep(0.005)  # far more than what comes after the session has cleared the counters
        assert monitor.read()
        with stoker.watch() as w:
            list(loader)
            with pytest.raises(UsageError, match="has not ended yet"):
                stoker.watch()
        list(loader)
        assert monitor.read()["data/samples_per_s"] > 0
    assert w.report is not None
    assert [e["batches"] for e in w.report["loaders"]] == [10]
    monitor.close()
    assert not patch._users
    assert "_stoker_clock" not in vars(iter(loader)), "nobody watches any more"


SCRIPT = """
    import sys
    from stoker.integrations.monitor import DataMonitor
    from torch.utils.data import DataLoader

    monitor = DataMonitor()
    loader = DataLoader(range(40), batch_size=4)
    for x in loader: pass
    print(monitor.read()["data/verdict"])
"""


@pytest.mark.slow
def test_under_stoker_run_both_count(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    p = forked_stoker(tmp_path, "--apply", "train.py")
    assert p.returncode == 0, p.stderr
    assert p.stdout in ("healthy\n", "input-bound\n")
    report = json.loads((tmp_path / "stoker-report.json").read_text())
    assert [e["batches"] for e in report["loaders"]] == [10]
    assert report["applied"]["settings"], "there is one watch on the process"


RANK = """
    import sys, time, torch.distributed as dist
    from stoker.integrations.monitor import DataMonitor
    from torch.utils.data import DataLoader

    class Nap(list):
        def __getitem__(self, i):
            time.sleep(0.02 if dist.get_rank() == 1 else 0.0)
            return i

    mode = sys.argv[1]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if mode == "absent" and rank == 1:
        dist.barrier()
        sys.exit()
    monitor = DataMonitor(timeout_s=3.0)
    for step in range(2):
        for x in DataLoader(Nap(range(8)), batch_size=2):
            time.sleep(0.01)
        if mode == "leaves" and rank == 1 and step == 1:
            break
        found = monitor.read()
        print(rank, step, found.get("data/wait_rank"), "data/wait_pct" in found, flush=True)
    dist.barrier()
"""


def ranks(tmp_path: Path, mode: str) -> tuple[list[str], str]:
    """Two ranks, as torchrun starts them. Returns the lines that they print, and what they say."""
    (tmp_path / "rank.py").write_text(textwrap.dedent(RANK))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    line = [sys.executable, "rank.py", mode]
    started = [
        subprocess.Popen(
            line,
            cwd=tmp_path,
            env={**env, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        done = [p.communicate(timeout=120) for p in started]
    finally:
        for p in started:
            p.kill()
    assert [p.returncode for p in started] == [0, 0], done
    return sorted(line for out, _ in done for line in out.splitlines()), "".join(err for _, err in done)


@pytest.mark.slow
def test_the_first_rank_hears_of_all(tmp_path: Path) -> None:
    lines, err = ranks(tmp_path, "all")
    assert lines == ["0 0 1 True", "0 1 1 True", "1 0 None False", "1 1 None False"]
    assert "StokerWarning" not in err


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["absent", "leaves"])
def test_a_rank_that_does_not_come_holds_nobody_up(mode: str, tmp_path: Path) -> None:
    lines, err = ranks(tmp_path, mode)
    assert [line for line in lines if line[0] == "0"] == [
        f"0 {step} {1 if mode == 'leaves' and not step else None} True" for step in range(2)
    ]
    assert err.count("StokerWarning") == 1
    assert "the numbers of all ranks cannot be collected, so each rank logs its own" in err
