"""Nothing is left behind: no process, no file in /dev/shm or the temp folder, however a run ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from stoker.core import processes
from tests.helpers import SEMAPHORES, left_in_shm, shm

LIMIT_S = 60  # fails on a hang; all of this takes a second or two
PRELUDE = f"""
import multiprocessing, os, sys, time, threading
multiprocessing.current_process()._config["semprefix"] = "/{SEMAPHORES}"
import torch, stoker
from torch.utils.data import Dataset

class Data(Dataset):
    def __init__(self, n=64, nap=0.0):
        self.n, self.nap = n, nap
    def __len__(self):
        return self.n
    def __getitem__(self, i):
        if self.nap:
            time.sleep(self.nap)
        return torch.full((20000,), float(i))

def workers(it):
    print(*[w.pid for w in it._workers], flush=True)
"""
WAYS = {
    "end": """
        loader = stoker.DataLoader(Data(), batch_size=4, num_workers=3)
        it = iter(loader); workers(it)
        for b in it: pass
    """,
    "exception": """
        loader = stoker.DataLoader(Data(), batch_size=4, num_workers=3, persistent_workers=True)
        it = iter(loader); workers(it)
        for b in it: raise RuntimeError("the script's own")
    """,
    "exit in the middle": """
        loader = stoker.DataLoader(Data(nap=0.01), batch_size=4, num_workers=3, persistent_workers=True)
        it = iter(loader); workers(it)
        next(it)
        sys.exit(3)
    """,
    "os._exit": """
        it = iter(stoker.DataLoader(Data(nap=0.01), batch_size=4, num_workers=3)); workers(it)
        next(it)
        os._exit(4)
    """,
    "in a thread": """
        def work():
            it = iter(stoker.DataLoader(Data(), batch_size=4, num_workers=3)); workers(it)
            for b in it: pass
        t = threading.Thread(target=work); t.start(); t.join()
    """,
    "spawn": """
        if __name__ == "__main__":
            it = iter(stoker.DataLoader(Data(), batch_size=4, num_workers=2, multiprocessing_context="spawn")); workers(it)
            for b in it: break
    """,
}
CODES = {"exception": 1, "exit in the middle": 3, "os._exit": 4}
FOREVER = """
    loader = stoker.DataLoader(Data(10**9, nap={nap}), batch_size=4, num_workers=3, persistent_workers={persistent})
    it = iter(loader); workers(it)
    for b in it: pass
"""


def start(tmp_path: Path, body: str) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(PRELUDE + textwrap.dedent(body))
    env = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore::UserWarning", str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
        start_new_session=True,
    )  # fmt: skip
    _started.append(process.pid)
    return process


_started: list[int] = []


@pytest.fixture(autouse=True)
def _nothing_runs_on() -> Iterator[None]:
    """A test that fails leaves no script behind that nobody ends."""
    yield
    while _started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(_started.pop(), signal.SIGKILL)


def wait_until(what: Callable[[], bool], seconds: float) -> bool:
    """Polls; the limit is there to fail on a hang, not to measure."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if what():
            return True
        threading.Event().wait(0.01)
    return what()


def gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE for p in pids)


def first_line(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    return [int(w) for w in process.stdout.readline().split()]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_left_when_a_script_ends(tmp_path: Path, way: str) -> None:
    before = shm()
    process = start(tmp_path, WAYS[way])
    out, err = process.communicate(timeout=LIMIT_S)
    pids = [int(w) for w in out.split()]
    assert process.returncode == CODES.get(way, 0), err
    assert len(pids) >= 2
    assert wait_until(lambda: gone(pids), LIMIT_S), err
    assert not left_in_shm(before)
    assert not [f for f in os.listdir(tmp_path / "tmp") if not f.startswith("torch")], os.listdir(tmp_path / "tmp")
    if way != "exception":
        assert not err, err


@pytest.mark.slow
@pytest.mark.parametrize(("nap", "persistent"), [(0.0, False), (30.0, True)])
def test_nothing_is_left_when_the_parent_is_killed(tmp_path: Path, nap: float, persistent: bool) -> None:
    before = shm()
    process = start(tmp_path, FOREVER.format(nap=nap, persistent=persistent))
    pids = first_line(process)
    assert len(pids) == 3
    process.kill()
    process.wait(LIMIT_S)
    assert wait_until(lambda: gone(pids), LIMIT_S)
    assert not left_in_shm(before)
    assert not os.listdir(tmp_path / "tmp")
    process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(("nap", "group"), [(0.0, True), (30.0, False)])
def test_ctrl_c_is_one_clean_traceback(tmp_path: Path, nap: float, group: bool) -> None:
    """Ctrl-C reaches the whole group, as from a terminal, or the main process alone, as from ``kill -INT``."""
    before = shm()
    process = start(tmp_path, FOREVER.format(nap=nap, persistent=False))
    pids = first_line(process)
    if group:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode in (-signal.SIGINT, 130, 1)
    assert err.count("Traceback (most recent call last)") == 1, err
    assert err.rstrip().endswith("KeyboardInterrupt"), err
    assert wait_until(lambda: gone(pids), LIMIT_S)
    assert not left_in_shm(before)


def test_a_loader_that_is_dropped_takes_its_workers_along() -> None:
    import torch

    import stoker

    it = iter(stoker.DataLoader(torch.utils.data.TensorDataset(torch.arange(100)), num_workers=2))
    next(it)
    workers = it._workers
    threads = threading.active_count()
    del it
    assert wait_until(lambda: all(not w.is_alive() for w in workers), LIMIT_S)
    assert [w.exitcode for w in workers] == [0, 0]
    assert threading.active_count() == threads


@pytest.mark.parametrize("iterable", [False, True])
def test_the_workers_are_gone_when_the_last_batch_is(iterable: bool) -> None:
    import torch

    import stoker

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[int]:
            return iter(range(10))

    data = Stream() if iterable else torch.utils.data.TensorDataset(torch.arange(100))
    it = iter(stoker.DataLoader(data, num_workers=2))
    for _ in it:
        pass
    assert [w.exitcode for w in it._workers] == [0, 0]


@pytest.mark.slow
def test_descriptors_do_not_pile_up() -> None:
    import torch

    import stoker

    loader = stoker.DataLoader(torch.utils.data.TensorDataset(torch.zeros(64, 5000)), batch_size=4, num_workers=2)
    for _ in loader:
        pass
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        for batch in loader:
            del batch
            break
        for _ in loader:
            pass
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.slow
def test_keeping_batches_costs_no_descriptors() -> None:
    script = """
        import resource, torch, stoker
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        samples = torch.arange(2000 * 1000).reshape(2000, 1000)
        loader = stoker.DataLoader(torch.utils.data.TensorDataset(samples), batch_size=5, num_workers=2)
        kept = list(loader)
        assert torch.equal(torch.cat([batch for (batch,) in kept]), samples)
        print(len(kept))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "400\n"), done.stderr


HOOKED = """
import os, signal, threading, time, warnings
import stoker
warnings.simplefilter("ignore")
main, heard = threading.get_native_id(), threading.Event()

def hook():
    # Another thread takes it, as the kernel chooses when the main one has it blocked; then its handler is due here.
    if not heard.is_set():
        heard.set()
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(100_000):
            pass

os.register_at_fork(after_in_parent=hook)
threading.Thread(target=threading.Event().wait, daemon=True).start()
before = signal.getsignal(signal.SIGINT)
try:
    list(stoker.DataLoader(range(100), num_workers=3))
    print("lost")
except KeyboardInterrupt:
    print("heard")
assert signal.getsignal(signal.SIGINT) is before
print(sum(b.sum().item() for b in stoker.DataLoader(range(100), num_workers=2)))
"""


@pytest.mark.slow
def test_ctrl_c_in_the_instant_of_a_fork_is_heard() -> None:
    """What a handler raises in somebody's hook of a fork is printed and forgotten."""
    done = subprocess.run([sys.executable, "-c", HOOKED], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["heard", "4950"], done.stderr


def test_a_child_is_ended_unless_somebody_else_has_reaped_it(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = subprocess.Popen(["sleep", "60"])
    processes.kill(runs.pid)
    assert not psutil.pid_exists(runs.pid)
    gone = subprocess.Popen(["true"])
    os.waitpid(gone.pid, 0)
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("the id may be another's"))
    processes.kill(gone.pid)
    runs.wait()
    gone.wait()


@pytest.mark.slow
def test_a_script_that_lets_the_kernel_reap_its_children_is_split_and_staged(tmp_path: Path) -> None:
    code = (
        PRELUDE
        + """
import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
staged = stoker.Staged(Data())
print([sum(len(b) for b in stoker.DataLoader(staged, batch_size=4, num_workers=2)) for _ in range(2)])
"""
    )
    script = tmp_path / "train.py"  # what has no source cannot be split
    script.write_text(code)
    done = subprocess.run([sys.executable, "-W", "ignore", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[64, 64]\n", done.stderr[-2000:]


STRICT = """
import sys, torch, stoker

class Data:
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return torch.full((30_000,), float(i))

if __name__ == "__main__":
    for persistent in (False, True):
        how = {"worker_method": "thread"} if sys.argv[1] == "thread" else {"multiprocessing_context": sys.argv[1]}
        loader = stoker.DataLoader(Data(), batch_size=2, num_workers=1, persistent_workers=persistent, **how)
        print(sum(float(batch[:, 0].sum()) for batch in loader))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fork", "spawn", "thread"])
def test_all_that_is_opened_is_closed(how: str, tmp_path: Path) -> None:
    """Python says of what is not, where it is asked to: each worker's socket."""
    path = tmp_path / "script.py"
    path.write_text(STRICT)
    line = [sys.executable, "-X", "dev", "-W", "error", str(path), how]
    out = subprocess.run(line, capture_output=True, text=True, timeout=180)
    assert (out.stdout, out.stderr) == ("28.0\n28.0\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_thread_that_iterates_at_the_end_says_nothing(tmp_path: Path, method: str) -> None:
    """A daemon thread waits for a batch, or gives out a task, while the interpreter's end closes its workers."""
    body = f"""
        if __name__ == "__main__":
            begun = threading.Event()
            def iterate():
                for b in stoker.DataLoader(Data(4000, 0.001), batch_size=4, num_workers=2, multiprocessing_context={method!r}):
                    begun.set()
            threading.Thread(target=iterate, daemon=True).start()
            begun.wait()
    """
    path = tmp_path / "train.py"
    path.write_text(PRELUDE + textwrap.dedent(body))
    p = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=LIMIT_S)
    assert (p.returncode, p.stdout, p.stderr) == (0, "", "")
