"""A sampling profiler for one thread: which line of which transform a task is at, and whether it runs or waits.

::

    sampling thread                                fetching thread (the process' main thread)
    1. sets ``asked``, requests an interrupt
       (``_thread.interrupt_main``)                2. between two instructions its signal handler, ``note``, appends
    3. reads from the kernel whether the              its own stack to ``_notes``, with the states read since it was
       fetching thread runs or waits                  asked
    4. counts what is in ``_notes``

- No signal is sent, so no system call of a C library is interrupted. The interpreter only runs the handler of one (C
  API ``PyErr_SetInterruptEx``).
- A thread that stays in a C function does not answer. The states of that time are counted with its next answer, whose
  stack is at the line that called the function.
- No thread walks another thread's frames. That is safe only while the interpreter's lock is held throughout, which
  Python code cannot promise.

It samples often in a worker's first seconds, later in bursts (``REST_S``). Nothing of the user's is wrapped or traced.
Statistical profiling: Graham, Kessler, McKusick, "gprof", 1982.
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
from typing import NamedTuple

from ...core import packages
from ...core.resources import threads_are_scarce
from ...core.stacks import DECODES, decoder, listed_in, short, transform_of

INTERVAL_S = 0.01  # between two samples at first
ENOUGH = 200  # samples before the first rest; a part of the code that they have not shown is rare
BURST = 10  # samples between two rests
BURST_S = 0.004  # between two of them
REST_S = (0.5, 1.3)  # drawn from, so that no loop of the script keeps step with it
ASK_AGAIN = 100  # samples, after which a thread that did not answer is asked once more
IDLE = 5  # samples between tasks, after which there are so many times fewer
# Python's default of 5 ms would let the fetching thread run on to its next call that releases the interpreter's lock,
# and code between two such calls would seem to take no time. Only in workers, and only in bursts: torch's workers have
# a thread that sends batches, and switching to it so soon costs them several percent.
SWITCH_S = 0.0002
MAX_DEPTH = 200  # frames of a stack
MAX_SLOW = 64  # samples of slow tasks that are kept by index
# The file whose frames call the dataset. Frames outside of it are the training loop's; a forked worker inherits them.
OUTER = os.path.join(packages.PACKAGE, "diagnosis", "watch", "fetch.py")
CACHE = os.path.join(packages.PACKAGE, "staging", "store", "")
UNUSED = range(getattr(signal, "SIGRTMAX", 0) - 1, getattr(signal, "SIGRTMIN", 0) + 2, -1)  # signals without a user

Code = tuple[str, str, str]  # kind, name, file:line


class _Note(NamedTuple):
    """Where the fetching thread was."""

    stack: list[tuple[CodeType, int]]  # innermost first
    states: list[int]  # samples since it was asked at which it ran, and at which it waited
    listed: str  # see ``stacks.listed_in``
    sample: tuple[object, ...]  # index of the sample that it loads, in a slow task; () where that is not known


class StackSampler:
    """Samples one thread. ``thread``: its ``threading.get_ident()``. Only a process' main thread can be sampled."""

    def __init__(self, thread: int, native: int, alone: bool = False) -> None:
        # by (kind, name, line): samples at which the thread ran, and at which it waited. Kinds are "decode",
        # "transform", "collate", "cache" (stoker's is read or filled) and "fetch" (all else).
        self.counts: dict[Code, list[int]] = {}
        # ``time.monotonic()`` at which the current task began; 0.0 between two tasks, when nothing is sampled
        self.began = 0.0
        self.min_task_s = 0.0  # age from which on a task is sampled
        self.collate: CodeType | None = None  # of the loader's collate function, if that is one in Python
        self.transforms: dict[CodeType, str] = {}  # see ``stacks.known_transforms``
        self.getters: set[CodeType] = set()  # see ``stacks.known_getters``
        self.slow_s = math.inf  # age from which on a task is a slow one
        self.slow: dict[str, int] = {}  # samples in slow tasks, by the index of the dataset's sample
        self.asked = False  # the thread is to note where it is
        self.total = 0  # samples so far
        self.cpu_s = 0.0  # of the sampling thread
        self._native = native  # its id for the kernel
        self._alone = alone  # it is a worker's, where a switch interval of ``SWITCH_S`` disturbs no one
        self._usual_s = sys.getswitchinterval()
        self._ended = False
        self._states = [0, 0]  # samples since it was asked: it ran, it waited
        self._notes: deque[_Note] = deque()
        if threading.get_ident() == thread and not threads_are_scarce() and _interrupts.install(self):
            try:
                threading.Thread(target=self._run, name="stoker_sampler", daemon=True).start()
            except RuntimeError:  # the system has no more of them (ulimit -u)
                _interrupts.remove(self)

    def end(self) -> None:
        """No more samples; the sampling thread ends when it wakes next."""
        self._ended = True
        _interrupts.remove(self)

    # The sampling thread.

    def _run(self) -> None:
        try:
            stat = os.open(f"/proc/self/task/{self._native}/stat", os.O_RDONLY)
        except OSError:
            return  # a kernel without that file
        between_tasks, left, interval_s = 0, ENOUGH, INTERVAL_S
        draw = random.Random()
        while not self._ended:
            if not left:
                left, interval_s = BURST, BURST_S
                self._switch(SWITCH_S, self._usual_s)
                time.sleep(draw.uniform(*REST_S))
            self._switch(self._usual_s, SWITCH_S)
            time.sleep(interval_s if between_tasks < IDLE else IDLE * INTERVAL_S)
            began = self.began
            between_tasks = 0 if began else between_tasks + 1
            with contextlib.suppress(Exception):  # at the interpreter's end, anything
                if began and time.monotonic() - began >= self.min_task_s:
                    left -= 1
                    self._sample(stat)
                while self._notes:
                    self._count(self._notes.popleft())
                self.cpu_s = time.thread_time()
        self._switch(SWITCH_S, self._usual_s)
        os.close(stat)

    def _switch(self, before_s: float, after_s: float) -> None:
        """Sets the interpreter's switch interval, unless the user has set another one meanwhile."""
        if self._alone and abs(sys.getswitchinterval() - before_s) < 1e-6:
            sys.setswitchinterval(after_s + 5e-7)  # Python cuts whole microseconds off, and 0.0002 may be a bit less

    def _sample(self, stat: int) -> None:
        # Asked before the state is read: reading releases the interpreter's lock, and the fetching thread, which may
        # wait for it, answers soonest at the moment when it gets the lock.
        self.total += 1
        if not self.asked or self.total % ASK_AGAIN == 0:
            self.asked = True  # first, because it may answer at once
            if not _interrupts.request():
                self.asked = False
        # proc(5), "state", by one system call: each one releases the interpreter's lock, and getting it back stops a
        # thread that computes in Python.
        running = os.pread(stat, 512, 0).rpartition(b")")[2][1:2] == b"R"
        self._states[0 if running else 1] += 1

    def _count(self, note: _Note) -> None:
        count = self.counts.setdefault(self.code_of(note.stack, note.listed), [0, 0])
        count[0] += note.states[0]
        count[1] += note.states[1]
        for index in note.sample:
            name = repr(index)[:40]
            self.slow[name] = self.slow.get(name, 0) + sum(note.states)

    def code_of(self, stack: list[tuple[CodeType, int]], listed: str = "") -> Code:
        """Kind, name and line of what a stack (code and line, innermost first) is at: the nearest code of the user's,
        and what it calls. ``listed``: see ``stacks.listed_in``."""
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
        call = DECODES.search(linecache.getline(own.co_filename, number))
        if call:
            return "decode", call[1], line
        return "fetch", own.co_name, line

    # The fetching thread.

    def note(self, frame: FrameType) -> None:
        """Notes where the fetching thread is. It runs in that thread, as a signal handler. What another signal's
        handler raises meanwhile goes on to the user's code."""
        self.asked = False
        states, self._states = self._states, [0, 0]
        if not self.began or not any(states):
            return  # the state of a sample that is not over goes with the next note
        stack: list[tuple[CodeType, int]] = []
        here: FrameType | None = frame
        while here is not None and len(stack) < MAX_DEPTH and here.f_code.co_filename != OUTER:
            stack.append((here.f_code, here.f_lineno))
            here = here.f_back
        if not stack:
            return
        slow = time.monotonic() - self.began > self.slow_s and len(self.slow) < MAX_SLOW
        self._notes.append(_Note(stack, states, listed_in(frame), self._sample_index(frame) if slow else ()))

    def _sample_index(self, frame: FrameType | None) -> tuple[object, ...]:
        """The index that the outermost dataset is asked for. Only here a frame's variables are read: that keeps them
        alive until the frame ends."""
        found: tuple[object, ...] = ()
        while frame is not None:
            code = frame.f_code
            if code in self.getters and code.co_argcount > 1:
                found = (frame.f_locals.get(code.co_varnames[1]),)
            frame = frame.f_back
        return found


class _Interrupts:
    """The signal handler of this process, for all samplers of its main thread."""

    def __init__(self) -> None:
        self._pid = 0
        self._signal: int | None = None
        self._samplers: list[StackSampler] = []

    def install(self, sampler: StackSampler) -> bool:
        """Whether the main thread, which must be the calling one, can be interrupted."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if self._pid != os.getpid():  # the parent's samplers have no thread here
            self._pid, self._samplers = os.getpid(), []
        if not self._is_ours():
            self._signal = next((n for n in UNUSED if signal.getsignal(n) == signal.SIG_DFL), None)
            if self._signal is None:
                return False
            signal.signal(self._signal, _on_interrupt)
        self._samplers.append(sampler)
        return True

    def _is_ours(self) -> bool:
        return self._signal is not None and signal.getsignal(self._signal) is _on_interrupt

    def remove(self, sampler: StackSampler) -> None:
        self._samplers = [s for s in self._samplers if s is not sampler]  # a new list: the handler may iterate the old

    def request(self) -> bool:
        """Makes the main thread run the handler soon; False where the script has taken the signal."""
        if self._signal is None or not self._is_ours():
            return False
        _thread.interrupt_main(self._signal)  # type: ignore[arg-type]
        return True

    def run(self, frame: FrameType | None) -> None:
        for sampler in self._samplers:
            if sampler.asked and frame is not None:
                sampler.note(frame)


_interrupts = _Interrupts()


def _on_interrupt(_: int, frame: FrameType | None) -> None:
    _interrupts.run(frame)
