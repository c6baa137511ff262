"""A sampling profiler for one thread: which line and transform a task is executing, and whether it runs or waits.

::

    sampling thread                                fetching thread (the process' main thread)
    1. sets ``asked``, requests an interrupt
       (``_thread.interrupt_main``)                2. between two instructions its signal handler, ``note``, appends
    3. reads from the kernel whether the              its own stack to ``_notes``, with the states read since it was
       fetching thread runs or waits                  asked
    4. counts what is in ``_notes``

- No real signal is sent, so no system call of a C library is interrupted. The interpreter only runs a signal's handler
  (C API ``PyErr_SetInterruptEx``).
- A thread inside a C function does not answer. The states read meanwhile are counted with its next answer, whose stack
  is at the line that called the function.
- No thread walks another thread's frames. That is safe only while the interpreter's lock is held throughout, which
  Python code cannot guarantee.

It samples often in a process's first seconds, later in bursts (``REST_S``). No user code is wrapped or traced.
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

INTERVAL_S = 0.01  # seconds between two samples at first
ENOUGH = 200  # samples before the first rest; code that they do not show is rare
BURST = 10  # samples between two rests
BURST_S = 0.004  # seconds between two samples of a burst
REST_S = (0.5, 1.3)  # rests are drawn from this range, so that no loop of the script runs in step with them
# The same in the script's own process, where a sample costs more: the interpreter's lock changes hands four times, and
# each time a thread has to be woken (docs/notes/observing.md).
OWN_INTERVAL_S, OWN_ENOUGH, OWN_REST_S = 0.04, 40, (0.1, 0.3)
ASK_AGAIN = 100  # samples after which a thread that did not answer is asked again
IDLE = 5  # after this many samples between tasks, sample this many times less often
# With Python's default of 5 ms the fetching thread would run on to its next call that releases the interpreter's lock.
# Code between two such calls would seem to take no time. Set only in workers and only in bursts: torch's workers have a
# thread that sends batches, and switching to it this soon costs them several percent.
SWITCH_S = 0.0002
MAX_DEPTH = 200  # frames of a stack
MAX_SLOW = 64  # most dataset indices kept of samples in slow tasks
# The file whose frames call the dataset. Frames outside it are the training loop's, which a forked worker inherits.
OUTER = os.path.join(packages.PACKAGE, "diagnosis", "watch", "fetch.py")
CACHE = os.path.join(packages.PACKAGE, "staging", "store", "")
UNUSED = range(getattr(signal, "SIGRTMAX", 0) - 1, getattr(signal, "SIGRTMIN", 0) + 2, -1)  # usually unused signals

Code = tuple[str, str, str]  # kind, name, file:line


class _Note(NamedTuple):
    """Where the fetching thread was."""

    stack: list[tuple[CodeType, int]]  # innermost first
    states: list[int]  # samples since it was asked: how often it ran, how often it waited
    listed: str  # see ``stacks.listed_in``
    sample: tuple[object, ...]  # index of the sample it loads, in a slow task; () if unknown


class StackSampler:
    """Samples the thread that creates it, which must be the process's main thread: no other one can be sampled."""

    def __init__(self, alone: bool = False) -> None:
        # by (kind, name, line): how often the thread ran, and how often it waited. Kinds are "decode", "transform",
        # "collate", "cache" (reading or filling stoker's) and "fetch" (everything else).
        self.counts: dict[Code, list[int]] = {}
        # ``time.monotonic()`` when the current task began; 0.0 between tasks, when nothing is sampled
        self.began = 0.0
        self.min_task_s = 0.0  # a task is sampled from this age
        self.collate: CodeType | None = None  # the code of the loader's collate function, if it is in Python
        self.transforms: dict[CodeType, str] = {}  # see ``stacks.known_transforms``
        self.getters: set[CodeType] = set()  # see ``stacks.known_getters``
        self.slow_s = math.inf  # a task is slow from this age
        self.slow: dict[str, int] = {}  # stack samples in slow tasks, by index of the dataset's sample
        self.asked = False  # the thread has been asked to note where it is
        self.total = 0  # stack samples so far
        self.cpu_s = 0.0  # of the sampling thread
        self._native = threading.get_native_id()  # of the sampled thread
        self._alone = alone  # the process is a worker, so changing the switch interval does not disturb the script
        self._usual_s = sys.getswitchinterval()
        self._ended = False
        self._states = [0, 0]  # samples since it was asked: how often it ran, how often it waited
        self._notes: deque[_Note] = deque()
        if not threads_are_scarce() and _interrupts.install(self):
            try:
                threading.Thread(target=self._run, name="stoker_sampler", daemon=True).start()
            except RuntimeError:  # the system allows no more threads (ulimit -u)
                _interrupts.remove(self)

    def end(self) -> None:
        """Stops sampling; the sampling thread ends when it next wakes."""
        self._ended = True
        _interrupts.remove(self)

    # The sampling thread.

    def _run(self) -> None:
        try:
            stat = os.open(f"/proc/self/task/{self._native}/stat", os.O_RDONLY)
        except OSError:
            return  # a kernel without that file
        left, interval_s = (ENOUGH, INTERVAL_S) if self._alone else (OWN_ENOUGH, OWN_INTERVAL_S)
        between_tasks = 0
        draw = random.Random()
        while not self._ended:
            if not left:
                left, interval_s = (BURST, BURST_S) if self._alone else (1, 0.0)
                self._switch(SWITCH_S, self._usual_s)
                time.sleep(draw.uniform(*(REST_S if self._alone else OWN_REST_S)))
            self._switch(self._usual_s, SWITCH_S)
            time.sleep(interval_s if between_tasks < IDLE else IDLE * INTERVAL_S)
            began = self.began
            between_tasks = 0 if began else between_tasks + 1
            with contextlib.suppress(Exception):  # at interpreter shutdown everything can fail
                if began and time.monotonic() - began >= self.min_task_s:
                    left -= 1
                    self._sample(stat)
                while self._notes:
                    self._count(self._notes.popleft())
                self.cpu_s = time.thread_time()
        self._switch(SWITCH_S, self._usual_s)
        os.close(stat)

    def _switch(self, before_s: float, after_s: float) -> None:
        """Sets the interpreter's switch interval, unless the user has changed it meanwhile."""
        if self._alone and abs(sys.getswitchinterval() - before_s) < 1e-6:
            sys.setswitchinterval(after_s + 5e-7)  # Python truncates to microseconds, and 0.0002 may be slightly less

    def _sample(self, stat: int) -> None:
        # Ask before reading the state: reading releases the interpreter's lock, and the fetching thread, if it waits
        # for the lock, can answer as soon as it gets it.
        self.total += 1
        if not self.asked or self.total % ASK_AGAIN == 0:
            self.asked = True  # before the request, because the thread may answer at once
            if not _interrupts.request():
                self.asked = False
        # proc(5), "state". A single system call, because each one releases the interpreter's lock, and getting it back
        # stops a thread that computes in Python.
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
        """Returns kind, name and line of the code that a stack (code and line, innermost first) is executing. The line
        is the innermost one in the user's code, if there is one. ``listed``: see ``stacks.listed_in``."""
        codes = [code for code, _ in stack]
        own, number = next((at for at in stack if packages.is_users(at[0].co_filename)), stack[0])
        ours = next((code.co_filename for code in codes if code.co_filename.startswith(packages.PACKAGE)), "")
        if ours.startswith(CACHE) and not packages.is_users(own.co_filename):
            return "cache", "stoker's cache", ""
        number = number or own.co_firstlineno
        line = f"{short(own.co_filename)}:{number}"
        torch_collate = packages.torch_file("utils", "data", "_utils", "collate.py")
        for code in codes:
            if code.co_filename == torch_collate or code is self.collate:
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
        """Notes where the fetching thread is. Runs in that thread, as a signal handler. An exception that another
        signal's handler raises meanwhile propagates to the user's code."""
        self.asked = False
        states, self._states = self._states, [0, 0]
        if not self.began or not any(states):
            return  # the sampling thread has not read a state yet: it is counted with the next note
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
        """Returns the index that the outermost dataset was asked for. Reads a frame's variables, which keeps them alive
        until the frame ends, so nothing else does."""
        found: tuple[object, ...] = ()
        while frame is not None:
            code = frame.f_code
            if code in self.getters and code.co_argcount > 1:
                found = (frame.f_locals.get(code.co_varnames[1]),)
            frame = frame.f_back
        return found


class _Interrupts:
    """This process's signal handler, shared by all samplers of its main thread."""

    def __init__(self) -> None:
        self._pid = 0
        self._signal: int | None = None
        self._samplers: list[StackSampler] = []

    def install(self, sampler: StackSampler) -> bool:
        """Registers a sampler. Returns False if the calling thread is not the main thread, or no signal is free."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if self._pid != os.getpid():  # after a fork, the parent's samplers have no thread here
            self._pid, self._samplers = os.getpid(), []
        if not self._is_ours():
            self._signal = next((n for n in UNUSED if signal.getsignal(n) == signal.SIG_DFL), None)
            if self._signal is None:
                return False
            signal.signal(self._signal, self._run)
        self._samplers.append(sampler)
        return True

    def _is_ours(self) -> bool:
        return self._signal is not None and signal.getsignal(self._signal) == self._run

    def remove(self, sampler: StackSampler) -> None:
        self._samplers = [s for s in self._samplers if s is not sampler]  # new list: the handler may iterate the old

    def request(self) -> bool:
        """Makes the main thread run the handler soon. Returns False if the script has taken over the signal."""
        if self._signal is None or not self._is_ours():
            return False
        _thread.interrupt_main(self._signal)  # type: ignore[arg-type]
        return True

    def _run(self, _: int, frame: FrameType | None) -> None:
        for sampler in self._samplers:
            if sampler.asked and frame is not None:
                sampler.note(frame)


_interrupts = _Interrupts()
