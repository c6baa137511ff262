"""Where the time goes inside a task: a thread that asks, a hundred times a second at first, later a few times in a row
and seldom, where the fetching one is.

Whether it runs or waits, the asking thread reads from the kernel (proc(5), "state"). Where it is, the fetching thread
notes itself, between two of its instructions: it is asked as by a signal that has a handler in Python, but without a
signal, which would interrupt the system calls of C libraries (``_thread.interrupt_main``, C API
``PyErr_SetInterruptEx``). Looks at a thread that stays in a C function are counted together, for the line that called
it. No thread walks another one's frames: that is safe only while the interpreter's lock is held throughout, which
Python code cannot promise, and ended in a segmentation fault once in some ten thousand looks on a busy machine.

Nothing of the user's is wrapped and nothing is traced. Statistical profiling: Graham, Kessler, McKusick, "gprof", 1982.
"""

from __future__ import annotations

import _thread
import contextlib
import linecache
import math
import os
import random
import signal
import sys
import threading
import time
from collections import deque
from types import CodeType, FrameType
from typing import Any, ClassVar

from ...core import packages
from ...core.stacks import DECODES, decoder, listed_in, short, transform_of

INTERVAL_S = 0.01
ENOUGH, BURST = 200, 10  # looks before the first rest, for what they have not shown is rare; looks before the next
BURST_S = 0.004  # between these
REST_S = (0.5, 1.3)  # drawn, so that no loop of the script's own keeps step with it
AGAIN = 100  # looks, after which a thread that did not answer is asked once more
WAKES_S = 0.25  # between two looks of a thread that has little to look at
# Python's default of 5 ms would let the fetching thread go on to its next call that lets the interpreter's lock go, and
# all that is between two such calls would look like nothing. Only in workers, and not while the looks rest: torch's
# workers have a thread that sends batches, and to give way to it so soon costs them several percent.
SWITCH_S = 0.0002
YIELD_S = 0.0001  # long enough for a thread that wants the interpreter's lock to take it
HELPS_S = 0.0005  # of CPU between two looks, from which on a thread is at work
MANY = 20  # threads, of which the looks would cost more than they say
DEEP = 200  # frames of a stack that are looked at
# The file whose frames call the dataset. Those outside of them are the training loop's; a forked worker inherits them.
OUTER = os.path.join(packages.PACKAGE, "diagnosis", "watch", "fetch.py")
CACHE = os.path.join(packages.PACKAGE, "staging", "store", "")
SLOW = 64  # samples that are kept by name
IDLE = 5  # looks at nothing, after which there are so many times fewer of them
UNUSED = range(getattr(signal, "SIGRTMAX", 0) - 1, getattr(signal, "SIGRTMIN", 0) + 2, -1)  # signals nobody sends


class StackSampler:
    """The looks at one thread.

    Args:
        thread: its ``threading.get_ident()``. A thread that is not the main one cannot be asked, and is not looked at.
        native: its id for the kernel.
        alone: in a worker, where nobody minds a switch interval of ``SWITCH_S``.

    Attributes:
        counts: by (kind, name, line): looks at which the thread ran, and at which it waited. Kinds are "decode",
            "transform", "collate", "cache" (stoker's is read or filled) and "fetch" (all else).
        began: ``time.monotonic()`` at which the task at hand began; 0.0 between two, when there is nothing to look at.
        least_s: tasks are not looked at before they have run for so long.
        rests: wake up seldom.
        collate: code of the loader's collate function, None where it is no Python function.
        transforms: see ``known_transforms``.
        getters: see ``known_getters``.
        slow_s: seconds from which a task is a slow one, and its sample's index is kept.
        slow: looks by such an index.
        asked: the thread is to note where it is.
        total: looks so far.
        cpu_s: CPU seconds of the thread that looks.
        helpers: looks at which the fetching thread waited while other threads of its process were at work; those
            threads, summed; and how often the interpreter's lock, let go for ``YIELD_S``, did not come back at once: a
            thread that computes in Python keeps it for a switch interval.
    """

    def __init__(self, thread: int, native: int, alone: bool = False) -> None:
        self.counts: dict[tuple[str, str, str], list[int]] = {}
        self.began = self.least_s = 0.0
        self.rests = False
        self.collate: Any = None
        self.transforms: dict[Any, str] = {}
        self.getters: set[Any] = set()
        self.slow_s = math.inf
        self.slow: dict[str, int] = {}
        self.helpers = [0, 0, 0]
        self.cpu_s = 0.0
        self._native, self._alone = native, alone
        self._usual_s = sys.getswitchinterval()
        self.asked = False
        self.total = 0
        self._ended = False
        self._seen = [0, 0]  # looks since it was asked: it ran, it waited
        self._cpu: dict[str, int] = {}
        self._notes: deque[_Note] = deque()
        if threading.get_ident() == thread and _Handler.install(self):
            threading.Thread(target=self._run, name="stoker_looks", daemon=True).start()

    def _run(self) -> None:
        idle, left, every_s, draw = 0, ENOUGH, INTERVAL_S, random.Random()
        try:
            self._stat = os.open(f"/proc/self/task/{self._native}/stat", os.O_RDONLY)
        except OSError:
            return  # a kernel that does not tell
        while not self._ended:
            if not left:
                left, every_s = BURST, BURST_S
                self._switch(SWITCH_S, self._usual_s)
                time.sleep(draw.uniform(*REST_S))
            self._switch(self._usual_s, SWITCH_S)
            time.sleep(WAKES_S if self.rests else every_s if idle < IDLE else IDLE * INTERVAL_S)
            began = self.began
            idle = 0 if began else idle + 1
            with contextlib.suppress(Exception):  # at the interpreter's end, anything
                if began and time.monotonic() - began >= self.least_s:
                    left -= 1
                    self._look()
                while self._notes:
                    self._count(self._notes.popleft())
                self.cpu_s = time.thread_time()
        self._switch(SWITCH_S, self._usual_s)
        os.close(self._stat)

    def _switch(self, before_s: float, after_s: float) -> None:
        if self._alone and abs(sys.getswitchinterval() - before_s) < 1e-6:  # else somebody has another one
            sys.setswitchinterval(after_s + 5e-7)  # Python cuts whole microseconds off, and 0.0002 may be a bit less

    def end(self) -> None:
        """No more looks; the thread that looks ends when it wakes next."""
        self._ended = True
        _Handler.looks = [looks for looks in _Handler.looks if looks is not self]  # the handler may be in the old one

    def _look(self) -> None:
        # Asked first: reading lets the interpreter's lock go, and who waits for it again gets it soonest where the
        # fetching thread lets it go itself, which is in some calls and not in others.
        self.total += 1
        if not self.asked or self.total % AGAIN == 0:
            self.asked = True  # before it is asked: it may answer at once
            if not _Handler.ask():
                self.asked = False
        ran = self._state() == b"R"
        self._seen[0 if ran else 1] += 1
        if not ran:
            self._look_at_helpers()

    def note(self, frame: FrameType) -> None:
        """Runs in the fetching thread, between two of its instructions. What may raise here is another signal's
        handler, and what that raises goes on to the user's code."""
        self.asked = False
        seen, self._seen = self._seen, [0, 0]
        if not self.began or not any(seen):
            return  # of a look that is not over the state is noted with the next one
        stack: list[tuple[CodeType, int]] = []
        here: FrameType | None = frame
        while here is not None and len(stack) < DEEP and here.f_code.co_filename != OUTER:
            stack.append((here.f_code, here.f_lineno))
            here = here.f_back
        if not stack:
            return
        slow = time.monotonic() - self.began > self.slow_s and len(self.slow) < SLOW
        self._notes.append((stack, seen, listed_in(frame), self._sample(frame) if slow else None))

    def _sample(self, frame: FrameType | None) -> tuple[Any] | None:
        """The index that the outermost dataset is asked for. Only here a frame's variables are looked at: that keeps
        them alive until the frame ends."""
        found = None
        while frame is not None:
            code = frame.f_code
            if code in self.getters and code.co_argcount > 1:
                found = (frame.f_locals.get(code.co_varnames[1]),)
            frame = frame.f_back
        return found

    def _count(self, note: _Note) -> None:
        stack, seen, listed, sample = note
        count = self.counts.setdefault(self.where(stack, listed), [0, 0])
        count[0] += seen[0]
        count[1] += seen[1]
        if sample is not None:
            index = repr(sample[0])[:40]
            self.slow[index] = self.slow.get(index, 0) + sum(seen)

    def _look_at_helpers(self) -> None:
        """Other threads of this process that have computed since the last look at them (proc(5), schedstat)."""
        now: dict[str, int] = {}
        own = {str(self._native), str(threading.get_native_id())}
        tids = os.listdir("/proc/self/task")
        for tid in tids if len(tids) <= MANY else ():
            if tid not in own:
                with contextlib.suppress(OSError), open(f"/proc/self/task/{tid}/schedstat", "rb") as f:
                    now[tid] = int(f.read().split()[0])
        before, self._cpu = self._cpu, now
        threads = sum(ns - before.get(tid, ns) > HELPS_S * 1e9 for tid, ns in now.items())
        if threads:
            self.helpers[0] += 1
            self.helpers[1] += threads
            self.helpers[2] += _lock_held()

    def _state(self) -> bytes:
        # One call into the kernel. Each one lets the interpreter's lock go, and to take it back from a thread that
        # computes in Python stops that thread; to open, read and close a file has six.
        return os.pread(self._stat, 512, 0).rpartition(b")")[2][1:2]

    def where(self, stack: list[tuple[CodeType, int]], listed: str = "") -> tuple[str, str, str]:
        """Kind, name and line of what a stack is at.

        Args:
            stack: code and line, innermost first.
            listed: see ``stacks.listed_in``.
        """
        codes = [code for code, _ in stack]
        own, number = next((at for at in stack if packages.is_users(at[0].co_filename)), stack[0])
        ours = next((code.co_filename for code in codes if code.co_filename.startswith(packages.PACKAGE)), "")
        if ours.startswith(CACHE) and not packages.is_users(own.co_filename):
            return "cache", "stoker's cache", ""
        number = number or own.co_firstlineno
        line = f"{short(own.co_filename)}:{number}"
        torch_collate = packages.torch_file("utils", "data", "_utils", "collate.py")
        for code in codes:
            if code.co_filename == torch_collate or (self.collate and code is self.collate):
                return "collate", code.co_name, line
        name = transform_of(codes, self.transforms, listed)
        if name:
            return "transform", name, line
        for code in codes:
            if decoder(code.co_filename):
                return "decode", decoder(code.co_filename), line
        found = DECODES.search(linecache.getline(own.co_filename, number))
        if found:
            return "decode", found[1], line
        return "fetch", own.co_name, line


_Note = tuple[list[tuple[CodeType, int]], list[int], str, "tuple[Any] | None"]


class _Handler:
    """The one handler of this process, for all that look at its main thread."""

    pid = 0
    number: int | None = None
    looks: ClassVar[list[StackSampler]] = []

    @classmethod
    def install(cls, looks: StackSampler) -> bool:
        """Whether the main thread, which must be the calling one, can be asked."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if cls.pid != os.getpid():  # what was asked for before a fork is asked for there
            cls.pid, cls.looks = os.getpid(), []
        if cls.number is None or signal.getsignal(cls.number) is not _handle:
            cls.number = next((n for n in UNUSED if signal.getsignal(n) == signal.SIG_DFL), None)
            if cls.number is None:
                return False
            signal.signal(cls.number, _handle)
        cls.looks.append(looks)
        return True

    @classmethod
    def ask(cls) -> bool:
        """Has the handler run soon; False where somebody else has taken the signal."""
        if cls.number is None or signal.getsignal(cls.number) is not _handle:
            return False
        _thread.interrupt_main(cls.number)  # type: ignore[arg-type]
        return True


def _handle(_: int, frame: FrameType | None) -> None:
    for looks in _Handler.looks:
        if looks.asked and frame is not None:
            looks.note(frame)


def _lock_held() -> bool:
    """Whether the interpreter's lock, let go for a moment, comes back only after somebody's switch interval. What the
    calling thread waited for a core meanwhile does not count."""
    delay, began = _delay(), time.monotonic()
    time.sleep(YIELD_S)
    took = time.monotonic() - began
    return took - (_delay() - delay) > YIELD_S + SWITCH_S


def _delay() -> float:
    """Seconds that the calling thread could have run, and had no core (proc(5), schedstat)."""
    with open("/proc/thread-self/schedstat", "rb") as f:
        return int(f.read().split()[1]) / 1e9
