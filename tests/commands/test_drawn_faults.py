"""Whatever is done to a script's workers, to its trial or to ``stoker run``, and whatever is short: the script ends under
``stoker run --apply`` as it does alone, or later. Script, fault and moment are drawn. ``STOKER_DRAWS=100`` draws more."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from .drawn_scripts import HEALED, SCRIPTS, source
from .test_shortages import may_unmount

SEED = int(os.environ.get("STOKER_SEED", "0"))
DRAWS = int(os.environ.get("STOKER_DRAWS", "3"))
LIMIT_S = 100  # of one run of a script
LOOKS_S = 1.0  # for a worker: in many scripts there is none at most moments
PATIENCE_S = 15  # until all of its processes have gone
MARK = "STOKER_DRAW"  # in the environment of all that a run starts
MB = 1 << 20
FEWER = "because no more can be started: Too many open files. Random augmentation depends on the number of workers"
MEMORY = Path("/sys/fs/cgroup/memory")
Outcome = tuple[int, str]


class Run:
    """A script that runs, what is done to it, and what came of it.

    Attributes:
        prefix: the command line that starts it, before Python.
        limit: called in its process first.
        act: called once, after ``lines`` lines of output and ``after_s`` seconds.
        notes: what was done, and what hangs or is left.
    """

    def __init__(self, folder: Path, prefix: list[str] | None = None, limit: Callable[[], None] | None = None) -> None:
        self.folder, self.prefix, self.limit = folder, prefix or [], limit
        self.act: Callable[[Run], None] = lambda run: None
        self.lines, self.after_s = 0, 0.0
        self.notes: list[str] = []
        self.wrong: list[str] = []

    def outcome(self, *command: str) -> Outcome:
        self.mark = f"{self.folder.name}-{time.monotonic_ns()}"
        # The path of a socket may have 107 characters (unix(7)).
        temp = tempfile.mkdtemp(prefix="st")
        env = {**os.environ, MARK: self.mark, "TMPDIR": temp, "XDG_CACHE_HOME": temp}
        with open(self.folder / "stderr", "w") as err:
            self.process = subprocess.Popen(
                [*self.prefix, sys.executable, *command, "train.py"],
                cwd=self.folder,
                env=env,
                text=True,
                stdout=subprocess.PIPE,
                stderr=err,
                preexec_fn=self.limit,
                start_new_session=True,
            )
        ends, acts = threading.Timer(LIMIT_S, self._hangs), threading.Timer(self.after_s, self.act, [self])
        ends.start()
        out: list[str] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            out.append(line)
            if len(out) == self.lines:
                acts.start()
        code = self.process.wait()
        ends.cancel()
        acts.cancel()
        psutil.wait_procs(self.all(), timeout=PATIENCE_S)
        left = self.all()
        if not any(self.is_own(p) for p in left):  # else their workers may be there, too
            self.wrong += [f"left: {p.pid}" for p in left]
        for p in left:
            p.kill()
        shutil.rmtree(temp, ignore_errors=True)
        return code, "".join(out)

    def _hangs(self) -> None:
        self.wrong.append("hangs")
        for p in self.all():
            with contextlib.suppress(psutil.Error):
                self.notes.append(
                    f"{p.pid} of {p.ppid()} {p.status()} {p.nice()} {Path(f'/proc/{p.pid}/wchan').read_text()}"
                )
                p.kill()

    def all(self) -> list[psutil.Process]:
        found = []
        for p in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if p.environ().get(MARK) == self.mark and p.status() != psutil.STATUS_ZOMBIE:
                    found.append(p)
        return found

    def is_own(self, p: psutil.Process) -> bool:
        """Whether the script started it, so that its death would be the script's affair."""
        return (self.folder / f"own-{p.pid}").exists()

    def workers(self) -> list[psutil.Process]:
        """Workers, or trials and what else is forked to look at samples."""
        (script,) = psutil.Process(self.process.pid).children()
        return [p for p in script.children(recursive=True) if not self.is_own(p)]

    def send(self, pid: int, what: signal.Signals) -> None:
        with contextlib.suppress(psutil.Error):
            p = psutil.Process(pid)
            self.notes.append(f"{what.name} to {pid}, nice {p.nice()}, {' '.join(p.cmdline()[:4])}")
            p.send_signal(what)


def is_part(got: Outcome, want: Outcome, code: int) -> bool:
    return got[0] == code and want[1].startswith(got[1])


def to_worker(draw: random.Random, run: Run, what: signal.Signals, pause_s: float = 0.0) -> None:
    share = draw.random()

    def act(run: Run) -> None:
        until = time.monotonic() + LOOKS_S
        while not run.notes and time.monotonic() < until:
            with contextlib.suppress(psutil.Error, ValueError):
                found = run.workers()
                trials = [p for p in found if p.nice() > psutil.Process().nice()]
                found = (share < 0.5 and trials) or found
                if found:
                    victim = found[int(share * len(found))].pid
                    run.send(victim, what)
                    if pause_s:
                        threading.Timer(pause_s, run.send, [victim, signal.SIGCONT]).start()

    run.act = act


def to_command(draw: random.Random, run: Run, what: signal.Signals, pause_s: float = 0.0) -> None:
    def act(run: Run) -> None:
        run.send(run.process.pid, what)
        if pause_s:
            threading.Timer(pause_s, run.send, [run.process.pid, signal.SIGCONT]).start()

    run.act = act


def few_descriptors(draw: random.Random, run: Run) -> None:
    n = draw.randrange(20, 60)
    run.limit = functools.partial(resource.setrlimit, resource.RLIMIT_NOFILE, (n, n))
    run.notes.append(f"{n} descriptors")


def small_files(draw: random.Random, run: Run) -> None:
    where, size = draw.choice(["/dev/shm", "$TMPDIR"]), draw.choice(["64k", "2m"])
    run.prefix = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o size={size} none {where} && exec "$@"', "sh"]
    run.notes.append(f"{where} of {size}")


def little_memory(draw: random.Random, run: Run) -> None:
    size, group = draw.randrange(800, 1400), MEMORY / f"drawn-{os.getpid()}"
    group.mkdir(exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(str(size * MB))
    run.prefix = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    run.notes.append(f"{size} MB")


Prepare = Callable[[random.Random, Run], None]
FAULTS: dict[str, Prepare] = {
    "SIGKILL to a worker": functools.partial(to_worker, what=signal.SIGKILL),
    "SIGSEGV to a worker": functools.partial(to_worker, what=signal.SIGSEGV),
    "SIGTERM to a worker": functools.partial(to_worker, what=signal.SIGTERM),
    "a worker is stopped": functools.partial(to_worker, what=signal.SIGSTOP, pause_s=1),
    "the command is stopped": functools.partial(to_command, what=signal.SIGSTOP, pause_s=3),
    "SIGKILL to the command": functools.partial(to_command, what=signal.SIGKILL),
    "SIGTERM to the command": functools.partial(to_command, what=signal.SIGTERM),
    "few descriptors": few_descriptors,
    **({"small files": small_files} if may_unmount() else {}),
    **({"little memory": little_memory} if os.access(MEMORY, os.W_OK) else {}),
}
ENDS = {"SIGKILL to the command": -signal.SIGKILL, "SIGTERM to the command": -signal.SIGTERM}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """What a script does by itself, found out once."""

    @functools.cache
    def of(name: str) -> Outcome:
        folder = tmp_path_factory.mktemp(name)
        (folder / "train.py").write_text(source(name))
        return Run(folder).outcome()

    return of


@pytest.mark.slow
@pytest.mark.timeout(4 * LIMIT_S)
@pytest.mark.parametrize("seed", range(SEED, SEED + DRAWS))
def test_drawn(tmp_path: Path, seed: int, alone: Callable[[str], Outcome]) -> None:
    draw = random.Random(seed)
    name, (fault, prepare) = draw.choice(list(SCRIPTS)), draw.choice(list(FAULTS.items()))
    (tmp_path / "train.py").write_text(source(name))
    want = alone(name)
    run = Run(tmp_path)
    prepare(draw, run)
    if run.limit or run.prefix:
        alone_too = [Run(tmp_path, run.prefix, run.limit).outcome() for _ in range(3)]  # some fail only now and then
        if any(got != want for got in alone_too):
            pytest.skip(f"{name}: what is short is what the script needs itself: {run.notes}")
    run.lines, run.after_s = draw.randint(1, want[1].count("\n")), draw.random() / 2
    got = run.outcome("-m", "stoker", "run", "--apply")
    about = f"seed {seed}: {name}, {fault} after {run.lines} lines and {run.after_s:.2f} s: {run.notes}"
    print(about)
    said = (tmp_path / "stderr").read_text()
    # Where the script chose workers, torch ends it when one dies.
    code = 1 if fault.endswith("a worker") and name not in HEALED and "exited unexpectedly" in said else ENDS.get(fault)
    # Fewer workers than the script chose draw other augmentation, which is said.
    is_right = got == want or (code is not None and is_part(got, want, code)) or (FEWER in said and got[0] == want[0])
    assert is_right, f"{about}\n{got}\nis not\n{want}\n{said[-5000:]}"
    assert not run.wrong, f"{about}: {run.wrong}\n{said[-5000:]}"
