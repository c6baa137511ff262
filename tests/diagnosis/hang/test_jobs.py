"""Whole jobs that hang, with torch's loader and stoker's: the cause, the process, and what the command prints."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stoker.commands.main import main
from stoker.diagnosis.hang import proc, stacks

from .helpers import LOADERS, judged, running, script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")

STEPS = ["pass", "time.sleep(0.3)", "sum(range(10**7))"]  # a loop that waits for data, one that sleeps, one that works
FIFO = "open({path!r}).read()"
# What sample 9 does, what the script does before, the cause, and words of the sentence.
HANGS: dict[str, tuple[str, str, str, str]] = {
    "sleep": ("time.sleep(1e6)", "pass", "sleep", "sleeps for another"),
    "lock": ("LOCK.acquire()", "LOCK.acquire()", "forked_lock", "another thread held when it was forked"),
    "fifo": (FIFO, "pass", "fifo", "which no process has open for writing"),
    "stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "pass", "stopped", "is stopped by a signal (SIGSTOP)"),
    "child": ("subprocess.run(['sleep', '1000'])", "pass", "child", "(sleep 1000)"),
    "threads": (
        "torch.set_num_threads(4); torch.ones(10**7).sum()",
        "torch.set_num_threads(4); torch.ones(10**7).sum()",
        "forked_threads",
        "for threads of lib",
    ),
    "shared lock": (
        "SHARED.acquire()",
        "SHARED = torch.multiprocessing.get_context('fork').Lock(); SHARED.acquire()",
        "shared_lock",
        "for a lock that processes share",
    ),
    "socket": ("a, b = socket.socketpair(); a.recv(1)", "pass", "socket", "waits for a socket"),
}


# What a worker waits for does not depend on the loader. Two of torch's show how its idle workers and threads are told.
JOBS = [(name, "stoker.DataLoader") for name in HANGS] + [("fifo", "DataLoader"), ("shared lock", "DataLoader")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "loader"), JOBS)
def test_a_worker_hangs(name: str, loader: str, tmp_path: Path) -> None:
    hang, before, cause_name, words = HANGS[name]
    fifo = tmp_path / "photo.jpg"
    os.mkfifo(fifo)
    with running(script(tmp_path, hang.format(path=str(fifo)), loader, before)) as p:
        # Whether a worker is stopped can be seen before its loop waits for it.
        # The other worker may not have made its batches yet.
        (job,), cause = judged(
            p.pid, cause_name, lambda jobs: jobs[0].waited_for and any(map(jobs[0].is_idle, jobs[0].workers))
        )
        assert words in cause.sentence
        assert cause.hangs is not False
        assert cause.advice
        assert job.loop is not None
        assert job.loop.pid == p.pid
        (worker,) = [w for w in job.workers if w.pid in cause.pids]
        assert len(job.workers) == 2
        assert worker in job.waited_for
        assert [job.is_idle(w) for w in job.workers if w is not worker] == [True]
        if name == "fifo":
            assert str(fifo) in worker.files
        if loader == "stoker.DataLoader":
            assert worker.task is not None
            assert worker.task[1] == 2  # samples 8 to 11
            if name != "stopped":  # which cannot write its stack
                assert "__getitem__" in stacks.place(worker.frames)
                assert "train.py:" in cause.sentence
        # The same by the worker's own id.
        assert judged(worker.pid, cause_name)[1].sentence[:20] == cause.sentence[:20]


# The worker has sent its first batch, of which the loop still wants the memory; then it keeps its GIL, or is stopped.
SENT = """
import ctypes, os, signal
from torch.utils.data import DataLoader, Dataset

R, W = os.pipe()
HANGS, SAYS = os.pipe()
libc = ctypes.PyDLL(None)  # its calls keep the GIL

class Data(Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, i):
        if i == 4:
            os.read(R, 1)
            print("there", flush=True)
            libc.write(SAYS, b".", 1)
            {hang}
        return i

it = iter(DataLoader(Data(), batch_size=4, num_workers=1))
it._data_queue._reader.poll(60)
os.write(W, b".")
os.read(HANGS, 1)  # else the worker may still hand it over
{until}
next(it)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hang", "until", "name"),
    [
        ("libc.sleep(10**6)", "", "sleep"),
        ("os.kill(os.getpid(), signal.SIGSTOP)", "os.waitpid(it._workers[0].pid, os.WUNTRACED)", "stopped"),
    ],
    ids=["sleep", "stopped"],
)
def test_a_worker_that_does_not_hand_over_the_memory_of_a_batch(
    hang: str, until: str, name: str, tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    path.write_text(SENT.format(hang=hang, until=until))
    with running(path) as p:
        (job,), cause = judged(p.pid, name, lambda jobs: jobs[0].waited_for)
        assert job.loop is not None
        assert job.loop.wait.kind == "socket"
        assert cause.pids == (job.workers[0].pid,)


@pytest.mark.slow
@pytest.mark.parametrize(("loader", "method"), [(LOADERS[0], "spawn"), (LOADERS[1], "forkserver")])
def test_workers_that_are_no_forks(loader: str, method: str, tmp_path: Path) -> None:
    with running(script(tmp_path, "time.sleep(1e6)", loader, method=method)) as p:
        (job,), cause = judged(p.pid, "sleep")
        assert cause.hangs
        assert len(job.workers) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("step", "loader"), [(STEPS[0], LOADERS[0]), (STEPS[1], LOADERS[1]), (STEPS[2], LOADERS[0])])
def test_a_healthy_job_does_not_hang(step: str, loader: str, tmp_path: Path) -> None:
    """Not now, and not at any of the next looks."""
    with running(script(tmp_path, "pass", loader, step=step)) as p:
        _, cause = judged(p.pid, "nothing")
        assert cause.hangs is False
        assert cause.sentence.startswith("Nothing hangs")
        for _ in range(3):
            assert judged(p.pid, "nothing")[1].hangs is False
        assert p.poll() is None


@pytest.mark.slow
def test_a_script_under_stoker_run_writes_its_stack_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Being asked changes nothing: the script ends as it would have."""
    step = "time.sleep(0.05); os.path.exists('asked') and sys.exit(7)"
    path = script(tmp_path, "pass", step=step)
    report = tmp_path / "report.json"
    monkeypatch.chdir(tmp_path)
    with running("-m", "stoker", "run", "--json", report, path) as p:
        (job,), _ = judged(p.pid, "nothing")
        assert job.loop is not None
        assert any("train.py" in str(frame) for frame in job.loop.frames)
        Path("asked").touch()
        assert p.wait(60) == 7


@pytest.mark.slow
def test_what_the_command_prints(tmp_path: Path) -> None:
    with running(script(tmp_path, "time.sleep(1e6)", "stoker.DataLoader")) as p:
        judged(p.pid, "sleep")
        command = [sys.executable, "-m", "stoker", "why"]
        data = json.loads(subprocess.check_output([*command, "--json", "-", str(p.pid)], text=True, timeout=60))
        assert data["cause"] == "sleep"
        assert data["hangs"] is True
        (job,) = data["jobs"]
        assert [m["role"] for m in job if m["role"] in ("loop", "worker")] == ["loop", "worker", "worker"]
        env = {**os.environ, "COLUMNS": "40"}
        text = subprocess.check_output([*command, str(p.pid)], text=True, timeout=60, env=env)
        assert max(map(len, text.splitlines())) <= 40
        assert text.startswith("Worker ")
        why = subprocess.Popen([*command, str(p.pid)], stdout=-3, stderr=subprocess.PIPE, text=True)
        time.sleep(0)
        why.send_signal(signal.SIGINT)
        assert why.wait(60) in (130, -signal.SIGINT)  # the second: before its first line
        assert p.poll() is None


def said(pid: int, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["why", str(pid)]) == 1
    found = capsys.readouterr()
    assert not found.out
    (line,) = found.err.splitlines()
    return line


def test_a_process_that_is_gone(capsys: pytest.CaptureFixture[str]) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert f"there is no process {gone.pid}" in said(gone.pid, capsys)


def test_a_process_that_is_not_python(capsys: pytest.CaptureFixture[str]) -> None:
    p = subprocess.Popen(["sleep", "1000"])
    try:
        while not Path(f"/proc/{p.pid}/cmdline").read_bytes():
            pass  # Popen may return before the other program has its arguments
        assert f"process {p.pid} is not Python (sleep)" in said(p.pid, capsys)
    finally:
        p.kill()
        p.wait()


def test_a_process_without_a_command_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It has none for an instant while it is replaced by another program (execve(2)), and when it has ended."""
    identify = proc.identify
    monkeypatch.setattr(proc, "identify", lambda pid: (x := identify(pid)) and x._replace(command=(), python=False))
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as p:
        assert p.stdin is not None
        assert p.stdout is not None
        p.stdin.write(b"x")
        p.stdin.flush()
        p.stdout.read(1)  # now it is another program
        assert f"process {p.pid} is not Python (cat)" in said(p.pid, capsys)
        p.kill()
        os.waitid(os.P_PID, p.pid, os.WEXITED | os.WNOWAIT)
        assert f"process {p.pid} has ended" in said(p.pid, capsys)


def test_a_process_of_somebody_else(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    assert f"process 1 belongs to user id {Path('/proc/1').stat().st_uid}" in said(1, capsys)


def test_a_wrong_number(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("0", "-3", "x", "1.5"):
        assert main(["why", wrong]) == 2
    capsys.readouterr()


@pytest.mark.slow
def test_what_may_not_be_read_is_said() -> None:
    """A process that lets nobody look into it (prctl(2), PR_SET_DUMPABLE), seen without CAP_SYS_PTRACE."""
    code = "import ctypes, time; ctypes.CDLL(None).prctl(4, 0); print('there', flush=True); time.sleep(1e6)"
    with running("-Ic", code) as p:
        line = [sys.executable, "-m", "stoker", "why", str(p.pid)]
        done = subprocess.run(line, capture_output=True, text=True, timeout=60, preexec_fn=_drop, check=False)
        assert done.returncode == 0, done.stderr
        assert "SYS_PTRACE" in done.stdout
        assert "hrtimer_nanosleep" not in done.stdout


def _drop() -> None:
    """Without effect for a user who does not have it (PR_CAPBSET_DROP)."""
    ctypes.CDLL(None).prctl(24, 19)


@pytest.mark.slow
def test_a_worker_that_is_left_over(tmp_path: Path) -> None:
    with running(script(tmp_path, "time.sleep(1e6)")) as p:
        _, cause = judged(p.pid, "sleep")
        (worker,) = cause.pids
        try:
            p.kill()
            p.wait()
            _, cause = judged(worker, "left_over")
            assert cause.advice == f"kill {worker}"
        finally:
            os.kill(worker, signal.SIGKILL)


# A mount in a namespace of the script's own (unshare(2), CLONE_NEWNS), whose server, the script, never answers.
MOUNT = """
libc = ctypes.CDLL(None)
own = libc.unshare(0x20000) == 0 and libc.mount(b"none", b"/", None, (1 << 18) | (1 << 14), None) == 0
fuse = os.open("/dev/fuse", os.O_RDWR)
options = b"fd=%d,rootmode=40000,user_id=0,group_id=0" % fuse
assert own and libc.mount(b"photos", sys.argv[1].encode(), b"fuse", 0, options) == 0
"""


@pytest.mark.slow
def test_a_mount_that_does_not_answer(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    alone = subprocess.run([sys.executable, "-Ic", "import ctypes, os, sys\n" + MOUNT, folder], timeout=60, check=False)
    if alone.returncode:
        pytest.skip("needs the right to mount, and fuse")
    before = f"import ctypes; exec({MOUNT!r})"
    with running(script(tmp_path, "open(sys.argv[1] + '/9.jpg')", before=before), folder) as p:
        _, cause = judged(p.pid, "storage")
        assert f"waits for storage: {folder}/9.jpg (fuse)" in cause.sentence


@pytest.mark.slow
def test_a_worker_that_died_unnoticed(tmp_path: Path) -> None:
    """The loop has its first batch, is elsewhere, and does not hear of it."""
    before = "R, W = os.pipe(); signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})"
    step = "os.write(W, b'.'); time.sleep(1e6)"
    with running(script(tmp_path, "os.read(R, 1); os._exit(3)", before=before, step=step)) as p:
        _, cause = judged(p.pid, "died")
        assert cause.hangs


@pytest.mark.slow
def test_each_process_under_stoker_run_writes_its_own_stack(tmp_path: Path) -> None:
    with running("-m", "stoker", "run", "--json", tmp_path / "r.json", script(tmp_path, "time.sleep(1e6)")) as p:
        (job,), cause = judged(p.pid, "sleep")
        assert {w.pid in cause.pids: any("__getitem__" in str(f) for f in w.frames) for w in job.workers} == {
            True: True,
            False: False,
        }
        assert all(w.frames for w in job.workers)
        assert job.loop is not None
        assert stacks.place(job.loop.frames).startswith("train.py:")
