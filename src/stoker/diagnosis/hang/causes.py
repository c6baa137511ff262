"""Rules that name a job's likely cause in one sentence, the most certain rule first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...core.terminal import human_bytes
from . import proc, stacks, waits
from .job import FETCHES, Job, Member

LONG_S = 60.0  # a healthy run has no sleep with this much time left
STUCK_S = 10.0  # healthy storage or servers answer a system call sooner
SHM_FULL = 0.02  # /dev/shm is full if less than this share is free
COLLECTIVES = ("distributed_c10d.py", "distributed/_functional_collectives.py")
NETWORK = ("nfs", "fuse", "ceph", "lustre", "gpfs", "cifs", "9p", "beegfs", "smb")
ASK_AGAIN = "Ask again in a while: it is at the same place if it hangs."
ELSEWHERE = 'multiprocessing_context="forkserver" in the DataLoader'


@dataclass(frozen=True)
class Cause:
    """What a job hangs on."""

    name: str  # of the rule; stable, for programs
    hangs: bool | None  # None: the job may only be slow
    sentence: str  # what happens
    advice: str = ""  # what to do; "" if nothing
    pids: tuple[int, ...] = ()  # the processes that the sentence is about


def judge(jobs: Sequence[Job]) -> Cause:
    """Returns the cause of the job that hangs, if one does. Prefers other causes to a rank that waits for another."""
    nothing = Cause("nothing", None, "No process of it trains.")
    found = map(cause_of, jobs)
    return min(found, key=lambda c: (c.hangs is False, c.name == "collective", c.hangs is None), default=nothing)


def cause_of(job: Job) -> Cause:
    """Returns the cause found by the first rule that applies."""
    loop = job.loop
    if loop is None:  # a worker that waits in a system call does not notice that its parent process has gone
        w = job.workers[0]
        sentence = f"{_name(job, w)} is left over: its training process has ended. It {w.wait.text}{_at(w)}."
        return Cause("left_over", True, sentence, f"kill {w.pid}", (w.pid,))
    for rule in (_stopped, _ended, _event_loop, _deadlock, _goes_on, _data):
        found = rule(job, loop)
        if found is not None:
            return found
    # It waits for something other than a batch.
    if stacks.inside(loop.frames, COLLECTIVES):
        return _ranks(job, loop)
    if loop.wait.kind == "runs":
        return Cause("nothing", False, f"Nothing hangs: {job.called} runs{_at(loop)}.")
    return _waiting(job, _thread_at_sample(loop) or loop)


def _stopped(job: Job, loop: Member) -> Cause | None:
    held = [m for m in (loop, *job.workers) if m.wait.kind in ("stopped", "debugged")]
    if not held:
        return None
    m = held[0]
    if m.wait.kind == "debugged":
        return Cause("debugged", True, f"{_name(job, m)} is held by a debugger.", "Let the debugger go on.", (m.pid,))
    pids = _pids(held)
    others = f", and {len(held) - 1} more" if len(held) > 1 else ""
    for_it = "" if m is loop else "; the loop gets no batch of it"
    sentence = f"{_name(job, m)} is stopped by a signal (SIGSTOP){others}{for_it}."
    return Cause("stopped", True, sentence, f"kill -CONT {' '.join(map(str, pids))}", pids)


def _ended(job: Job, loop: Member) -> Cause | None:
    dead = [w for w in job.workers if w.wait.kind == "ended"]
    if not dead or loop.busy or any(w.wrote for w in job.workers):
        return None
    free, size = proc.shm_free(loop.pid) or (0, 0)
    full = f" /dev/shm has {human_bytes(free)} free of {human_bytes(size)}." if free < SHM_FULL * size else ""
    sentence = f"{_name(job, dead[0])} has ended, and the loop has not noticed.{full}"
    advice = "Look into the kernel's log for a lack of memory; a larger /dev/shm: docker run --shm-size=8g."
    return Cause("died", True, sentence, advice, _pids(dead))


def _deadlock(job: Job, loop: Member) -> Cause | None:
    found = [w for w in job.workers if w.still and waits.deadlocked(w.process)]
    return _lock(job, found[0]) if found else None


def _event_loop(job: Job, loop: Member) -> Cause | None:
    """fsspec checks once a second whether its event loop is done; in a forked process no thread runs that loop."""
    for w in job.workers:
        others = [frames for tid, frames in w.stacks.threads.items() if tid != w.pid]
        runs = any(stacks.inside(frames, "asyncio/base_events.py") for frames in others)
        seen = w.stacks.source == "py-spy" or len(w.process.threads) == 1
        if stacks.inside(w.frames, "fsspec/asyn.py") and seen and not runs:
            sentence = f"{_name(job, w)} waits{_at(w)} for fsspec's event loop, whose thread a fork does not copy."
            advice = f"Open the file system in the worker, or use {ELSEWHERE}."
            return Cause("forked_fsspec", True, sentence, advice, (w.pid,))
    return None


def _lock(job: Job, m: Member) -> Cause:
    """Judges a worker or loop that waits for a lock."""
    certain = m.still and waits.deadlocked(m.process)
    at = _at(m)
    name = _name(job, m)
    forked = job.loop is not None and m.role == "worker" and m.who.command == job.loop.who.command
    hangs = certain or _hangs(m)
    if m.wait.library and forked:
        sentence = f"{name} waits{at} for threads of {m.wait.library}, which a fork does not copy."
        return Cause("forked_threads", hangs, sentence, f"Use {ELSEWHERE}.", (m.pid,))
    if not m.wait.private:
        sentence = f"{name} waits{at} for a lock that processes share; the one that had it may have been killed."
        return Cause("shared_lock", hangs, sentence, "Start the run anew; see whether a worker was killed.", (m.pid,))
    if forked and certain:
        sentence = f"{name} waits{at} for a lock that another thread held when it was forked: nothing can release it."
        return Cause("forked_lock", True, sentence, f"Use {ELSEWHERE}, or make the lock in the worker.", (m.pid,))
    if certain:
        sentence = f"{name} waits{at} for a lock that only itself could release."
        return Cause("deadlock", True, sentence, "Look which code holds the lock.", (m.pid,))
    return Cause("lock", hangs, f"{name} waits{at} for a lock{_since(m)}.", "Look which code holds the lock.", (m.pid,))


def _goes_on(job: Job, loop: Member) -> Cause | None:
    """Batches arrive, or the loop computes."""
    if any(w.wrote and not job.is_idle(w) for w in job.workers) or any(w.wrote for w in job.waited_for):
        return Cause("nothing", False, "Nothing hangs: workers sent batches during this second.")
    if job.waited_for or not loop.busy:
        return None
    if stacks.inside(loop.frames, COLLECTIVES):
        return _ranks(job, loop)
    return Cause("nothing", False, f"Nothing hangs: {job.called} computes ({loop.core:.0%} of a core){_at(loop)}.")


def _data(job: Job, loop: Member) -> Cause | None:
    """The loop waits for a batch: finds what the workers that are making one wait for, if any is."""
    if not job.waited_for:
        return None
    late = [w for w in job.waited_for if not job.is_idle(w)]
    still = sorted((w for w in late if w.still and not w.busy), key=lambda w: (w.wait.kind == "pipe", w.task or (0, 0)))
    if still:
        return _waiting(job, still[0])
    if late:
        w = max(late, key=lambda w: w.core)
        sure = w.core >= 0.2
        begin = f"Nothing hangs: {job.called}" if sure else _name(job, loop)
        does = "computes" if sure else "runs now and then"
        sentence = f"{begin} waits for {_name(job, w, inside=True)}, which {does} ({w.core:.0%} of a core){_at(w)}."
        return Cause("busy", False if sure else None, sentence, "" if sure else ASK_AGAIN, (w.pid,))
    n = len(job.workers)
    who = "its worker waits" if n == 1 else f"all {n} workers wait"
    hangs = _hangs(loop) if all(w.still for w in job.waited_for) else None
    advice = "A message was lost, or a sampler waits: look at the stacks."
    return Cause("lost_task", hangs, f"The loop waits for a batch, and {who} for a task.", advice, _pids(job.workers))


def _thread_at_sample(loop: Member) -> Member | None:
    """Returns a thread of the loop that loads a sample (``worker_method="thread"``), as if it were a process."""
    for thread in loop.process.threads[1:]:
        frames = loop.stacks.threads.get(thread.id, [])
        if stacks.inside(frames, FETCHES):
            wait, seen = waits.wait_of(loop.process, thread), stacks.Stacks({loop.pid: frames})
            return replace(loop, role="worker thread of", wait=wait, stacks=seen, sample=stacks.sample(frames))
    return None


def _ranks(job: Job, loop: Member) -> Cause:
    frame = next(f for f in loop.frames if f.file.endswith(COLLECTIVES))
    at = _at(loop)
    sentence = f"{_name(job, loop)} waits in torch.distributed ({frame.function}){at} for ranks that are not there yet."
    advice = "Run stoker why on the other ranks: one is elsewhere, has ended, or has fewer batches."
    return Cause("collective", _hangs(loop), sentence, advice, (loop.pid,))


def _waiting(job: Job, m: Member) -> Cause:
    """Judges what a process waits for, by the kind of its wait."""
    rules: dict[str, Callable[[Job, Member], Cause]] = {
        "lock": _lock,
        "sleep": _sleeping,
        "fifo": _fifo,
        "storage": _storage,
        "file lock": _file_lock,
        "child": _child,
    }
    kind = m.wait.kind
    if kind in rules:
        return rules[kind](job, m)
    advice = {
        "socket": "See whether the other end answers; give the client a time limit.",
        "terminal": "Answer it, or take the breakpoint or input() out.",
        "pipe": "The process at the other end of the pipe has to write: look at its stack.",
    }.get(kind, ASK_AGAIN)
    return _stuck(job, m, f"{_sample(m)}{_at(m)}{_since(m)}", advice)


def _stuck(job: Job, m: Member, details: str, advice: str) -> Cause:
    """A wait that is a hang once it has lasted long."""
    sentence = f"{_name(job, m)} {m.wait.text}{details}."
    return Cause(m.wait.kind.replace(" ", "_"), _hangs(m), sentence, advice, (m.pid,))


def _sleeping(job: Job, m: Member) -> Cause:
    left_s, at = m.wait.left_s, f"{_sample(m)}{_at(m)}"
    if left_s is not None and left_s < LONG_S:
        name = _name(job, m, inside=True)
        return Cause("nothing", False, f"Nothing hangs: {name} sleeps{at}, for {left_s:.1f} s more.")
    hangs = True if left_s is not None else _hangs(m)
    return replace(_stuck(job, m, at, "Look why that line sleeps."), hangs=hangs)


def _fifo(job: Job, m: Member) -> Cause:
    users = {pid: found for pid, found in proc.users(m.wait.path).items() if pid != m.pid}
    other = [pid for pid, found in users.items() if any(d.reads if m.wait.writes else d.writes for d in found)]
    end = f"open for {'reading' if m.wait.writes else 'writing'}"
    who = f"process {other[0]}" if other else "no process"
    cause = _stuck(job, m, f", which {who} has {end}{_sample(m)}{_at(m)}", f"See what should have it {end}.")
    return cause if other else replace(cause, hangs=True)


def _storage(job: Job, m: Member) -> Cause:
    system = proc.file_system(m.pid, m.wait.path) if m.wait.path.startswith("/") else ""
    kind = f" ({system})" if system else ""
    server = "the server of the mount" if system.startswith(NETWORK) else "the device (dmesg)"
    details = f"{kind}{_sample(m)}{_at(m)}{_since(m)}: it does not answer"
    return _stuck(job, m, details, f"See whether {server} is there.")


def _file_lock(job: Job, m: Member) -> Cause:
    holder = f", which process {m.wait.pid} holds" if m.wait.pid else ""
    return _stuck(job, m, f"{holder}{_at(m)}", "End the process that holds it.")


def _child(job: Job, m: Member) -> Cause:
    child = proc.identify(m.wait.pid) if m.wait.pid else None
    what = f" ({' '.join(child.command)[:60] or child.name})" if child else ""
    return _stuck(job, m, f"{what}{_at(m)}{_since(m)}", "Look at that process.")


def _name(job: Job, m: Member, inside: bool = False) -> str:
    word = job.called if m is job.loop else f"{m.role} {m.pid}"
    return word if inside else word[0].upper() + word[1:]


def _at(m: Member) -> str:
    found = stacks.place(m.frames)
    return f" at {found}" if found else ""


def _sample(m: Member) -> str:
    return f" for sample {m.sample}" if m.sample else ""


def _since(m: Member) -> str:
    return f", since {m.process.idle_s:,.0f} s" if _hangs(m) else ""


def _hangs(m: Member) -> bool | None:
    """True if it has waited long, None if it may only be slow."""
    return True if (m.process.idle_s or 0.0) >= STUCK_S else None


def _pids(members: Sequence[Member]) -> tuple[int, ...]:
    return tuple(m.pid for m in members)
