"""Every fault with every kind of worker, and at every moment of a run, each in a process of its own and under a time
limit: each two of these three are met.

What has to come of it is one table (``expected``): the undisturbed run to the bit, the run without one sample, the error
that names it, or, where nothing can survive, the end of the process. Never a hang, and nothing is left behind.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import json
import multiprocessing.forkserver
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import Dataset

import stoker
from stoker.workers.process_pool import ProcessPool
from tests.helpers import left_in_shm, name_semaphores, shm

SEED = int(os.environ.get("STOKER_SEED", "0"))
LIMIT_S = 60  # for what takes a second, or three where processes start anew
LEFT_S = 30  # until all are gone: a second, and what a busy machine adds
POLL_S = 0.005  # until the next look at what ends by itself
LEAVE_S = 0.5  # for a sample that hangs while its loader ends; five seconds otherwise
BATCH, N = 4, 40
TIMEOUT_S = 0.5

KINDS: dict[str, dict[str, Any]] = {
    "inline": {"num_workers": 0},
    "thread": {"num_workers": 2, "worker_method": "thread"},
    "fork": {"num_workers": 2},
    "auto": {"num_workers": "auto"},
    "spawn": {"num_workers": 2, "multiprocessing_context": "spawn"},
    "forkserver": {"num_workers": 2, "multiprocessing_context": "forkserver"},
}
AT = {"start": 1, "middle": 18, "last batch": N - 1, "between epochs": 1, "shutdown": 30}

DEATHS = {"SIGKILL": -9, "SIGSEGV": -11, "exit": 3}
AGAIN = ("SIGKILL always", "SIGKILL always, skip")
SAMPLES = (*DEATHS, *AGAIN, "raise", "skip", "hang", "hang, skip")  # what a sample does
CONSUMER = ("interrupt", "parent killed", "leave", "descriptors")  # what happens to the loop


class Odd(Exception):
    def __init__(self, index: int, why: str) -> None:
        super().__init__(index, why)


class Data(Dataset):
    """Index and a draw; one sample has a fault, from the moment on that a file says so."""

    def __init__(self, fault: str = "", at: int = -1, folder: str = "") -> None:
        self.fault, self.at, self.folder = fault, at, folder

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> torch.Tensor:
        if i == self.at and os.path.exists(f"{self.folder}/armed"):
            self.fail(i)
        return torch.stack([torch.tensor(float(i)), torch.rand(())])

    def fail(self, i: int) -> None:
        once = False
        with contextlib.suppress(FileExistsError):
            os.close(os.open(f"{self.folder}/failed", os.O_CREAT | os.O_EXCL))
            once = True
        if self.fault in DEATHS and not once:
            return
        if self.fault == "exit":
            os._exit(DEATHS["exit"])
        if self.fault in DEATHS or self.fault in AGAIN:
            os.kill(os.getpid(), -DEATHS[self.fault.split()[0]])
        if self.fault.startswith("hang"):
            while True:
                time.sleep(1)
        raise Odd(i, "broken")


def loader_of(kind: str, fault: str, data: Data, persistent: bool = False) -> Any:
    settings = dict(KINDS[kind])
    if persistent and settings["num_workers"]:
        settings["persistent_workers"] = True
    if fault.startswith("hang"):
        settings["sample_timeout"] = TIMEOUT_S
    if fault.endswith("skip"):
        settings |= {"on_error": "skip", "quarantine": None}
    loader = stoker.DataLoader(data, batch_size=BATCH, **settings)
    if kind == "auto":
        loader.resize(2)
    return loader


def epoch(it: Any, out: dict[str, Any], upto: int = 1 << 30) -> None:
    """Rows to ``out``, errors too; goes on after an error, as a loop that catches it does."""
    for _ in range(upto):
        try:
            out["rows"] += next(it).tolist()
        except StopIteration:
            return
        except Exception as e:
            notes = "".join(getattr(e, "__notes__", ()))
            out["errors"].append([type(e).__name__, f"{e}{notes}"])
            if "Threads cannot be killed" in str(e):
                return  # nor be waited for
            if len(out["errors"]) > 20:
                raise


def disturb(fault: str, at_once: bool = True) -> None:
    """What happens to the consumer."""
    if fault == "interrupt":
        signal.setitimer(signal.ITIMER_REAL, 1e-6 if at_once else random.Random(SEED).uniform(1e-6, 2e-2))
    elif fault == "parent killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "descriptors":
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 3, 4096))


def life(kind: str, fault: str, moment: str, folder: str) -> dict[str, Any]:
    """The run, in its own process."""
    out: dict[str, Any] = {"rows": [], "errors": []}
    consumer = fault if fault in CONSUMER else ""

    def raise_it(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, raise_it)
    if fault.startswith("hang"):
        ProcessPool.close = functools.partialmethod(ProcessPool.close, LEAVE_S)  # type: ignore[assignment]
    torch.manual_seed(7)
    data = Data() if consumer or not fault else Data(fault, AT[moment], folder)
    loader = loader_of(kind, fault, data, moment == "between epochs")
    try:
        for number in range(2):
            first, second = number == 0, number == 1
            if not consumer and fault and first == (moment != "between epochs"):
                Path(folder, "armed").touch()
            if consumer and second and moment == "between epochs":
                disturb(consumer)
            it = iter(loader)
            if consumer and first and moment == "start":
                disturb(consumer)
                if consumer == "leave":
                    del it
                    continue
            if moment == "shutdown" and first and fault:
                epoch(it, out, 5)
                end = time.monotonic() + LIMIT_S
                # without workers ahead of the loop nothing happens while it leaves
                while not consumer and kind != "inline" and not os.path.exists(f"{folder}/failed"):
                    assert time.monotonic() < end, "the fault never came"
                disturb(consumer, at_once=False)
                del it
                gc.collect()
                Path(folder, "armed").unlink(missing_ok=True)
                out["rows"].clear()
                out["errors"].clear()
                continue
            if consumer and first and moment in ("middle", "last batch"):
                epoch(it, out, 5 if moment == "middle" else N // BATCH - 1)
                disturb(consumer)
                if consumer == "leave":
                    del it
                    continue
            epoch(it, out)
            del it
    except KeyboardInterrupt:
        out["interrupted"] = True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return out


def left_in(session: int) -> list[psutil.Process]:
    out = []
    for p in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(p.pid) == session and p.status() != psutil.STATUS_ZOMBIE:
                out.append(p)
    return out


def lived(kind: str, fault: str, moment: str, folder: str) -> tuple[int, dict[str, Any] | None]:
    """How a process ended in which ``life`` ran, and what it told. Fails where it takes too long or leaves anything."""
    read, write = os.pipe()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()
            name_semaphores()
            os.close(read)
            signal.alarm(0)
            warnings.simplefilter("ignore")
            faulthandler.disable()  # pytest's: crashes are meant here
            server = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
            # A fork server that a test before this one has started is no child of this process.
            server._forkserver_pid = server._forkserver_address = server._forkserver_alive_fd = None
            sys.stderr = open(f"{folder}/stderr", "w", buffering=1)
            os.dup2(sys.stderr.fileno(), 2)
            with os.fdopen(write, "w") as file:
                out = life(kind, fault, moment, folder)
                file.write(json.dumps(out))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code) if code else _leave()
    os.close(write)
    text = b""
    with os.fdopen(read, "rb") as file:
        while True:
            ready = select.select([file], [], [], max(0.0, began + LIMIT_S - time.monotonic()))[0]
            if not ready:
                break
            piece = os.read(file.fileno(), 1 << 16)
            if not piece:
                break
            text += piece
    status: int | None = None
    while status is None and time.monotonic() < began + LIMIT_S:
        pid, found = os.waitpid(child, os.WNOHANG)
        status = found if pid else None
        time.sleep(POLL_S)
    said = Path(folder, "stderr").read_text()
    if status is None:
        for p in left_in(child):
            p.kill()
        os.waitpid(child, 0)
        pytest.fail(f"hangs for more than {LIMIT_S} s, seed {SEED}\n{said}")
    limit = time.monotonic() + LEFT_S
    while (left := left_in(child)) and time.monotonic() < limit:
        time.sleep(POLL_S)
    for p in left:
        p.kill()
    assert not left, (left, said)
    return os.waitstatus_to_exitcode(status), json.loads(text) if text else None


def _leave() -> None:
    """As the interpreter does at its end: what is registered for it runs, threads that can be waited for are."""
    import threading

    threading._shutdown()  # type: ignore[attr-defined]
    import atexit

    atexit._run_exitfuncs()
    os._exit(0)


@functools.cache
def calm(kind: str, moment: str) -> list[list[float]]:
    """The rows of an undisturbed run."""
    folder = tempfile.mkdtemp()
    code, out = lived(kind, "", moment, folder)
    assert code == 0, Path(folder, "stderr").read_text()
    shutil.rmtree(folder)
    assert out is not None
    assert not out["errors"]
    assert len(out["rows"]) == 2 * N
    return out["rows"]  # type: ignore[no-any-return]


def numbers(rows: list[list[float]]) -> list[int]:
    return [int(row[0]) for row in rows]


def expected(kind: str, fault: str, moment: str, code: int, out: dict[str, Any] | None) -> None:
    """What has to come of it."""
    processes = kind not in ("inline", "thread")
    at, whole = AT[moment], list(range(N))
    batch = range(at // BATCH * BATCH, at // BATCH * BATCH + BATCH)
    without = [i for i in whole if i not in batch]
    if fault.startswith(tuple(DEATHS)) and not processes:
        if moment == "shutdown" and kind == "inline":
            assert code == 0  # nobody loads ahead
        else:
            assert code == DEATHS[fault.split()[0]]  # what crashes here is the script itself
        return
    if fault == "parent killed":
        assert code == -9
        return
    if fault in ("hang", "hang, skip") and not processes:
        assert code == 1  # a UsageError: nobody looks at the clock, or a thread cannot be killed
        return
    assert code == 0
    assert out is not None
    if fault == "interrupt":
        # What comes while ``__del__`` runs Python drops; then the run goes on.
        assert out.get("interrupted") or (moment == "shutdown" and numbers(out["rows"]) == list(range(N)))
        assert not out["errors"]
        return
    assert not out.get("interrupted")
    rows, errors = numbers(out["rows"]), out["errors"]
    if moment == "shutdown":  # the second epoch is whole
        assert rows == whole, (rows, errors)
        return
    if fault == "leave":
        assert numbers(out["rows"])[-N:] == whole
        assert not errors
        return
    if fault == "descriptors":
        assert set(whole) >= set(rows)
        assert all(name in ("OSError", "StokerError", "UsageError", "WorkerDiedError") for name, _ in errors)
        return
    if fault in DEATHS:
        assert not errors
        assert out["rows"] == calm(kind, moment if moment == "between epochs" else "")  # to the bit
        return
    if fault.endswith("skip"):
        assert not errors
        kept = [i for i in whole if i != at]
        assert rows == (whole + kept if moment == "between epochs" else kept + kept)
        return
    assert errors
    name, words = errors[0]
    odd = "Odd" if kind == "inline" else "RuntimeError"  # by name as in torch, for its constructor wants two
    kinds = {"raise": odd, "hang": "SampleTimeoutError", "hang, skip": "SampleTimeoutError"}
    assert name == kinds.get(fault, "WorkerDiedError"), errors
    assert f"sample {at}" in words
    once = moment == "between epochs"
    assert len(errors) == (1 if once else 2)
    assert rows == (whole + without if once else without + without)


FAULTS, MOMENTS = (*SAMPLES, *CONSUMER), list(AT)
# Each kind meets each fault once. Kinds and faults outnumber the moments, so each moment, too, meets each kind and each
# fault. With other seeds they are other three. Workers that are no forks of this process take turns, too.
CASES = [
    pytest.param(
        kind,
        fault,
        moment := MOMENTS[(k + f + SEED) % len(MOMENTS)],
        marks=() if kind == "fork" else pytest.mark.slow,
        id=f"{kind}-{fault}-{moment}",
    )
    for k, kind in enumerate(KINDS)
    for f, fault in enumerate(FAULTS)
    if kind != ("spawn", "forkserver")[(f + SEED) % 2]
]


@pytest.mark.few(1)
@pytest.mark.timeout(2 * LIMIT_S + 30)
@pytest.mark.parametrize(("kind", "fault", "moment"), CASES)
def test_the_run_survives_or_says_why(kind: str, fault: str, moment: str, tmp_path: Path) -> None:
    before = shm()
    code, out = lived(kind, fault, moment, str(tmp_path))
    try:
        expected(kind, fault, moment, code, out)
    except AssertionError:
        print("seed", SEED, "exit code", code, "out", out, "stderr", (tmp_path / "stderr").read_text(), sep="\n")
        raise
    assert not left_in_shm(before)
