"""The processes of a training job: what each of them waits for, and which process waits for which."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ...transport import arena
from . import proc, stacks, tree, waits
from .proc import Identity, Process
from .stacks import Frame, Stacks
from .waits import Wait

LOOK_S = 1.0  # seconds between the two observations
MOVED = 0.02  # of a core; a loop that only checks every five seconds whether its workers live uses a hundredth of that
READERS = 4  # processes whose stacks are read at the same time
FETCHES = ("utils/data/_utils/fetch.py", "stoker/workers/fetcher.py", "stoker/workers/gather.py")
# Open files that are not samples. torch's batches are in /dev/shm, where they are unlinked at once.
NO_DATA = re.compile(r"^/(dev/(?!shm/)|proc/|sys/|memfd:)|\.(py|pyc|so|log)$|\(deleted\)$|^(?!/)")


@dataclass
class Member:
    """A process of the job."""

    role: str  # loop, worker, launcher, helper or other
    who: Identity  # which process it is
    process: Process  # as of the second observation
    core: float  # cores used between the observations
    still: bool  # its main thread did not run between the observations
    wrote: bool  # it wrote or sent between the observations; a worker: a batch
    wait: Wait  # of its main thread
    stacks: Stacks = field(default_factory=lambda: Stacks({}))  # of its threads
    for_pids: list[int] = field(default_factory=list)  # the processes for which it waits
    task: tuple[int, int] | None = None  # epoch and number; only for stoker's workers
    place: int | None = None  # which sample of the task it loads, counted from 0; None if unknown
    sample: str = ""  # the index that it loads, as ``repr`` shows it; "" if unknown
    files: list[str] = field(default_factory=list)  # files that it has open (its loop does not) or is about to open

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def frames(self) -> list[Frame]:
        """The main thread's stack, innermost frame first."""
        return self.stacks.threads.get(self.pid, [])

    @property
    def busy(self) -> bool:
        """Whether it computed between the observations."""
        return self.core >= MOVED


@dataclass
class Job:
    """A loop with its workers, or a single worker whose loop has ended."""

    loop: Member | None  # the process that trains; None if it has ended and left a worker
    workers: list[Member]  # its workers
    others: list[Member]  # helpers and other children
    called: str = "the loop"  # the loop, as sentences name it

    @property
    def members(self) -> list[Member]:
        return [*([self.loop] if self.loop else []), *self.workers, *self.others]

    @property
    def waited_for(self) -> list[Member]:
        """The workers from which the loop waits for a batch; empty if it waits for something else."""
        return [w for w in self.workers if self.loop is not None and w.pid in self.loop.for_pids]

    def is_idle(self, m: Member) -> bool:
        """Whether a process is a worker that waits for a task from its loop."""
        if m.role != "worker" or m.wait.kind != "pipe" or m.task is not None or stacks.inside(m.frames, FETCHES):
            return False
        return any(x is not None and x.pid in m.for_pids for x in (self.loop, *self.others))


def look(pid: int) -> list[Job]:
    """Observes a job twice and reads its stacks. Returns one ``Job`` for each process that trains. Raises StokerError
    as ``tree.find`` does."""
    first = {p: found for p in tree.find(pid) if (found := proc.look(p)) is not None}
    began = time.monotonic()
    time.sleep(LOOK_S)
    known = tree.find(pid)
    second = {p: found for p in known if (found := proc.look(p)) is not None}
    took_s = time.monotonic() - began
    known = {p: who for p, who in known.items() if p in second}
    roles = tree.roles(known)
    members = {
        p: _member(roles[p], who, first.get(p), second[p], took_s, second.get(who.parent)) for p, who in known.items()
    }
    asked = [m for m in members.values() if m.role in ("loop", "worker")]
    asked = [m for m in asked if m.process.main.state not in "TtDZX"]  # in these states they would not answer
    with ThreadPoolExecutor(READERS) as pool:
        for m, seen in zip(asked, pool.map(lambda m: stacks.of_process(m.pid), asked), strict=True):
            m.stacks = seen
            m.sample = stacks.sample(m.frames)
    for m in members.values():
        m.for_pids = _waits_for(m, members)
    return _jobs(members, known, roles)


def _member(
    role: str, who: Identity, before: Process | None, now: Process, took_s: float, parent: Process | None
) -> Member:
    core, still, wrote = 0.0, False, False
    if before is not None:
        used_ns = sum(t.cpu_ns for t in now.threads) - sum(t.cpu_ns for t in before.threads)
        core = max(0, used_ns) / 1e9 / took_s
        still = before.main.switches == now.main.switches
        wrote = now.written is not None and before.written is not None and now.written > before.written
    wait = waits.wait_of(now, now.main)
    if wait.kind == "storage" and (before is None or before.main.state != "D"):
        wait = waits.STATES["R"]  # it reads and makes progress
    member = Member(role, who, now, core, still, wrote, wait)
    if role == "worker":
        _read_arena(member)
        member.files = _files(now, wait, parent)
    return member


def _read_arena(member: Member) -> None:
    """Reads what a stoker worker reports in its arena. The worker has its own arena open twice, and those of other
    workers at most once, inherited through fork. The task queue's memory never reads as ready."""
    found = collections.defaultdict(list)
    for number, d in (member.process.descriptors or {}).items():
        if d.target.startswith("/memfd:stoker "):
            with contextlib.suppress(OSError):
                path = f"/proc/{member.pid}/fd/{number}"
                found[os.stat(path).st_ino].append(path)  # a file in memory, on which stat never blocks
    for paths in sorted(found.values(), key=len, reverse=True):
        with contextlib.suppress(OSError):
            said = arena.progress(paths[0])
            if said is not None:
                member.task = said.task
                sample = said.position & 0xFFFFFFFF
                member.place = sample - 1 if sample else None
                return


def _files(worker: Process, wait: Wait, loop: Process | None) -> list[str]:
    """Returns the sample's files: those that a worker has open and its loop has not, and the one it waits for."""
    theirs = {(n, d.target) for n, d in ((loop.descriptors if loop else None) or {}).items()}
    opened = [d.target for n, d in (worker.descriptors or {}).items() if (n, d.target) not in theirs]
    about = [wait.path] if wait.path.startswith("/") else []
    return list(dict.fromkeys(path for path in (*about, *opened) if not NO_DATA.search(path)))


def _waits_for(member: Member, members: dict[int, Member]) -> list[int]:
    """Returns the processes for which ``member`` waits: a child, the holder of a file lock, or those that hold the
    other end of its pipes. If the main thread waits for a lock, its other threads' pipes count too."""
    wait = member.wait
    if wait.pid is not None:
        return [wait.pid]
    reads, writes = set(wait.reads), set(wait.writes)
    if wait.kind == "lock":
        for thread in member.process.threads[1:]:
            reads |= set(waits.wait_of(member.process, thread).reads)
    found = []
    for other in members.values():
        ends = (other.process.descriptors or {}).values()
        holds = any((d.target in reads and d.writes) or (d.target in writes and d.reads) for d in ends)
        if holds and other is not member:
            found.append(other.pid)
    return found or _stuck_senders(member, members)


def _stuck_senders(loop: Member, members: dict[int, Member]) -> list[int]:
    """Returns the workers that may owe a loop the memory of a batch.

    With torch's loader, a thread of the worker sends the descriptor of each tensor over a Unix socket. It cannot while
    its process is stopped, or while the main thread waits holding the GIL. ``/proc`` does not say which process holds
    the other end, so this returns the workers that serve such sockets and did not run."""
    if loop.role != "loop" or loop.wait.kind != "socket":
        return []
    serves = proc.unix_sockets(loop.pid)
    if not any(target in serves for target in loop.wait.reads):
        return []
    stuck = [m for m in members.values() if m.role == "worker" and m.still and m.wait.kind != "pipe"]
    return [m.pid for m in stuck if any(serves.get(d.target) for d in (m.process.descriptors or {}).values())]


def _jobs(members: dict[int, Member], known: tree.Tree, roles: dict[int, str]) -> list[Job]:
    jobs = {p: Job(m, [], []) for p, m in members.items() if m.role == "loop"}
    left = []
    for p, m in members.items():
        loop = tree.loop_of(p, known, roles)
        if m.role != "loop" and loop is not None:
            job = jobs[loop]
            (job.workers if m.role == "worker" else job.others).append(m)
        elif m.role == "worker":
            left.append(Job(None, [m], []))
    if len(jobs) > 1:
        for p, job in jobs.items():
            job.called = f"loop {p}"
    return [*jobs.values(), *left]
