"""Renders a job and its cause as text and as JSON."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from typing import TextIO

from ...core import terminal
from ...core.terminal import printable, style
from ...core.types import JsonObject
from . import proc, stacks
from .causes import Cause
from .job import Job, Member
from .stacks import Frame
from .waits import wait_of

SCHEMA = 1
FRAMES = 6  # most frames of a stack in the text
FILES = 3
TASK_LOOPS = ("utils/data/_utils/worker.py", "stoker/workers/process_main.py")


def render(jobs: Sequence[Job], cause: Cause, stream: TextIO) -> str:
    """Renders the cause, then each process, then what could not be seen, no wider than the stream."""
    colour, columns = terminal.colour_wanted(stream), terminal.width(stream)
    name = {True: "red", False: "green", None: "yellow"}[cause.hangs]
    out = [style(line, f"bold {name}", colour) for line in textwrap.wrap(printable(cause.sentence), columns)]
    out += textwrap.wrap(printable(cause.advice), columns)
    for job in jobs:
        out.append("")
        for m in job.members:
            if m.role in ("loop", "worker"):
                out += _member(job, m, columns, colour)
            elif m.role == "other":
                out += _wrapped(f"other {m.pid}  {_command(m)}: {m.wait.text}", columns)
    notes = how_far(jobs)
    if notes:
        out.append("")
        out += [line for note in notes for line in textwrap.wrap(note, columns, subsequent_indent="  ")]
    return "\n".join(out)


def _wrapped(text: str, columns: int) -> list[str]:
    return textwrap.wrap(printable(text), columns, subsequent_indent="    ")


def _member(job: Job, m: Member, columns: int, colour: bool) -> list[str]:
    first, *more = _wrapped(f"{m.role} {m.pid}: {_state(job, m)}", columns)
    head = f"{m.role} {m.pid}"
    lines = [style(head, "bold", colour) + first.removeprefix(head), *more]
    if m.files:
        left = len(m.files) - FILES
        files = ", ".join(m.files[:FILES]) + (f", and {left} more" if left > 0 else "")
        lines += textwrap.wrap(printable(f"file {files}"), columns, initial_indent="    ", subsequent_indent="      ")
    shown = [] if job.is_idle(m) else shortened(m.frames)
    lines += [f"    {printable(str(frame))}"[:columns] for frame in shown[:FRAMES]]
    if len(shown) > FRAMES:
        lines.append(f"    ... {len(shown) - FRAMES} more")
    return lines


def _state(job: Job, m: Member) -> str:
    text = "waits for a task" if job.is_idle(m) else m.wait.text
    workers = [w.pid for w in job.waited_for]
    if m is job.loop and workers:
        text = f"waits for a batch of worker {workers[0]}" if len(workers) == 1 else "waits for a batch of its workers"
    parts = [text if m.wait.kind != "runs" else f"runs, {m.core:.0%} of a core"]
    if m.task is not None:
        where = f", its sample number {m.place + 1}" if m.place is not None else ""
        parts.append(f"task {m.task[1]} of epoch {m.task[0]}{where}")
    if m.sample:
        parts.append(f"sample {m.sample}")
    idle_s = m.process.idle_s
    if idle_s is not None and idle_s >= 1 and m.wait.kind not in ("runs", "ended"):
        parts.append(f"has not run for {idle_s:,.0f} s")
    return "; ".join(parts)


def _command(m: Member) -> str:
    words = m.who.command
    return " ".join([os.path.basename(words[0]), *words[1:]])[:60] if words else m.who.name


def shortened(frames: Sequence[Frame]) -> list[Frame]:
    """Keeps the innermost call and the user's own lines; for a worker, only those inside its loop over tasks."""
    kept: list[Frame] = []
    for i, frame in enumerate(frames):
        if kept and frame.file.endswith(TASK_LOOPS):
            break
        if i == 0 or frame.users:
            kept.append(frame)
    return kept


def how_far(jobs: Sequence[Job]) -> list[str]:
    """Returns notes on what could not be seen, and on what would show it."""
    members = [m for job in jobs for m in job.members if m.role in ("loop", "worker") and m.wait.kind != "ended"]
    notes = []
    missing = [m for m in members if not m.frames and m.process.main.state not in "TtDZX"]
    refused = next((m.stacks.refused for m in missing if m.stacks.refused), "")
    if refused:
        notes.append(f"No stacks: {refused}. {allowed_by()}")
    elif missing and stacks.py_spy() is None:
        install = "py-spy is not installed (pip install 'stoker[why]')"
        notes.append(f"No stacks: {install}. Jobs that stoker run starts write their own.")
    unseen = [m for m in members if m.process.descriptors is None or not m.process.calls_seen]
    if unseen and not refused:
        notes.append(f"System calls and open files may not be read, only states. {allowed_by()}")
    return notes


def allowed_by() -> str:
    """Returns what would let this process inspect another one (ptrace(2), "Ptrace access mode checking")."""
    ways = ["run it as root"] if os.geteuid() else []
    ways += ["set kernel.yama.ptrace_scope to 0"] if proc.only_ancestors_trace() else []
    ways += ["start the container with --cap-add SYS_PTRACE"]
    return f"To see more, {', or '.join(ways)}; or begin the job with stoker run, and it writes its own stacks."


def as_dict(pid: int, jobs: Sequence[Job], cause: Cause) -> JsonObject:
    """Returns the same and more, for JSON (docs/why.md)."""
    return {
        "schema": SCHEMA,
        "pid": pid,
        "hangs": cause.hangs,
        "cause": cause.name,
        "sentence": cause.sentence,
        "advice": cause.advice,
        "pids": list(cause.pids),
        "jobs": [[_process(job, m) for m in job.members] for job in jobs],
        "notes": how_far(jobs),
    }


def _process(job: Job, m: Member) -> JsonObject:
    return {
        "pid": m.pid,
        "role": m.role,
        "command": list(m.who.command),
        "state": m.process.main.state,
        "idle": job.is_idle(m),
        "core": round(m.core, 4),
        "idle_s": m.process.idle_s,
        "waits_for": m.for_pids,
        "task": None if m.task is None else {"epoch": m.task[0], "number": m.task[1], "place": m.place},
        "sample": m.sample or None,
        "files": m.files,
        "stacks": m.stacks.source or None,
        "threads": [
            {
                "id": thread.id,
                "state": thread.state,
                "kernel": thread.where or None,
                "wait": (wait := wait_of(m.process, thread)).kind,
                "text": wait.text,
                "left_s": wait.left_s,
                "stack": [
                    {"function": f.function, "file": f.file, "line": f.line}
                    for f in m.stacks.threads.get(thread.id, [])
                ],
            }
            for thread in m.process.threads
        ],
    }
