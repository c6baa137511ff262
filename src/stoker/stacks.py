"""Where the time goes inside a task: a thread that looks at the fetching thread's stack a hundred times a second.

Nothing of the user's is wrapped and nothing is traced; a look costs a few microseconds of another core, and only while
a task runs. A look says which line was at work, under which transform, and whether the thread ran or waited (proc(5),
"state"). Statistical profiling: Graham, Kessler, McKusick, "gprof", 1982; without signals, which would interrupt the
system calls of C libraries.
"""

from __future__ import annotations

import contextlib
import linecache
import math
import os
import re
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

INTERVAL_S = 0.01
WAKES_S = 0.25  # between two looks of a thread that has little to look at
# Python's default of 5 ms would let the fetching thread go on to its next call that lets the interpreter's lock go, and
# all that is between two such calls would look like nothing. Only in workers, where nobody else competes for it.
SWITCH_S = 0.0002
YIELD_S = 0.0001  # long enough for a thread that wants the interpreter's lock to take it
DEEP = 200  # frames of a stack that are looked at
SLOW = 64  # samples that are kept by name
IDLE = 5  # looks at nothing, after which there are so many times fewer of them
DECODERS = re.compile(  # files of libraries that decode
    r"[/\\](PIL|cv2|imageio|tifffile|skimage[/\\]io|torchvision[/\\]io|decord|av|soundfile|librosa|pydicom|rawpy|"
    r"torchcodec|turbojpeg|simplejpeg|zarr|h5py|numcodecs|pyarrow)[/\\]|[/\\](gzip|lzma|bz2|zipfile|tarfile)\.py$|"
    r"[/\\]json[/\\]decoder\.py$"
)
DECODES = re.compile(  # and calls of libraries in C, which have no frame of their own
    r"\b(imread|imdecode|decode_\w+|decode|decompress|read_image|frombytes|Image\.open|loadtxt|fromstring|json\.loads|"
    r"pickle\.loads?|msgpack\.\w+|orjson\.loads)\("
)
RESTS = (
    "threading.py",
    "queue.py",
    "selectors.py",
    "socket.py",
    "_base.py",
    "thread.py",
    "connection.py",
    "pin_memory.py",
)
TORCH_COLLATE = os.path.join("torch", "utils", "data", "_utils", "collate.py")
MODULE_CALL = os.path.join("torch", "nn", "modules", "module.py")


class Looks:
    """The looks at one thread.

    Args:
        thread: its ``threading.get_ident()``.
        native: its id for the kernel.

    Attributes:
        counts: by (kind, name, line): looks at which the thread ran, and at which it waited. Kinds are "decode",
            "transform", "collate" and "fetch" (all else).
        active: look; set while a task runs.
        began: ``time.monotonic()`` at which it began.
        least_s: tasks are not looked at before they have run for so long.
        rests: wake up seldom.
        collate: code of the loader's collate function, None where it is no Python function.
        transforms: see ``known_transforms``.
        getters: see ``known_getters``.
        slow_at: ``time.monotonic()`` from which the task at hand is a slow one, and its sample's index is kept.
        slow: looks by such an index.
        helpers: looks at which the fetching thread waited while other threads of its process were at work; those
            threads, summed; and how often the interpreter's lock, let go for ``YIELD_S``, did not come back at once: a
            thread that computes in Python keeps it for a switch interval.
    """

    def __init__(self, thread: int, native: int) -> None:
        self.counts: dict[tuple[str, str, str], list[int]] = {}
        self.active = False
        self.began = self.least_s = 0.0
        self.rests = False
        self.collate: Any = None
        self.transforms: dict[Any, str] = {}
        self.getters: set[Any] = set()
        self.slow_at = math.inf
        self.slow: dict[str, int] = {}
        self.helpers = [0, 0, 0]
        self._thread, self._stat = thread, f"/proc/self/task/{native}/stat"
        self._pid = os.getpid()
        threading.Thread(target=self._run, name="stoker_looks", daemon=True).start()

    def _run(self) -> None:
        idle = 0
        while os.getpid() == self._pid:
            time.sleep(WAKES_S if self.rests else INTERVAL_S if idle < IDLE else IDLE * INTERVAL_S)
            idle = 0 if self.active else idle + 1
            if self.active and time.monotonic() - self.began >= self.least_s:
                with contextlib.suppress(Exception):  # a frame that moves on; at the interpreter's end, anything
                    self._look()

    def _look(self) -> None:
        ran = self._state(self._stat) == "R"
        frames = sys._current_frames()
        frame = frames.get(self._thread)
        if frame is None or not self.active:
            return
        # What a dataset's own pool of threads does is what the fetching thread waits for.
        helpers = self._helpers(frames) if not ran and len(frames) > 2 and _at_rest(frame) else []
        if helpers:
            self.helpers[0] += 1
            self.helpers[1] += len(helpers)
            frame, stat = helpers[self.helpers[0] % len(helpers)]
            ran = self._state(stat) == "R"
            self.helpers[2] += _lock_held()
        stack = _stack(frame)
        count = self.counts.setdefault(self.where(stack), [0, 0])
        count[0 if ran else 1] += 1
        if time.monotonic() > self.slow_at and len(self.slow) < SLOW:
            # Only here a frame's variables are looked at: that keeps them alive until the frame ends.
            for f in reversed(stack):
                if f.f_code in self.getters and f.f_code.co_argcount > 1:
                    index = repr(f.f_locals.get(f.f_code.co_varnames[1]))[:40]
                    self.slow[index] = self.slow.get(index, 0) + 1
                    break

    def _helpers(self, frames: dict[int, FrameType]) -> list[tuple[FrameType, str]]:
        """Other threads of this process that are at work, or want to be: their frames, and the files in which the
        kernel says whether they run."""
        out = []
        own = {self._thread, threading.get_ident()}
        for t in threading.enumerate():
            frame = frames.get(t.ident or 0)
            if t.ident in own or frame is None or t.native_id is None or _at_rest(frame):
                continue
            out.append((frame, f"/proc/self/task/{t.native_id}/stat"))
        return out

    def _state(self, stat: str) -> str:
        with open(stat, "rb") as f:
            return f.read(512).rpartition(b")")[2][1:2].decode()

    def where(self, stack: list[FrameType]) -> tuple[str, str, str]:
        """Kind, name and line of what a stack, innermost frame first, is at."""
        own = next((f for f in stack if _is_users(f.f_code.co_filename)), stack[0])
        number = own.f_lineno or own.f_code.co_firstlineno  # a frame that moves on has none for a moment
        line = f"{_short(own.f_code.co_filename)}:{number}"
        for f in stack:
            if f.f_code.co_filename.endswith(TORCH_COLLATE) or (self.collate and f.f_code is self.collate):
                return "collate", f.f_code.co_name, line
        name = transform_of(stack, self.transforms)
        if name:
            return "transform", name, line
        for f in stack:
            if DECODERS.search(f.f_code.co_filename):
                return "decode", _library(f.f_code.co_filename), line
        found = DECODES.search(linecache.getline(own.f_code.co_filename, number))
        if found:
            return "decode", found[1], line
        return "fetch", own.f_code.co_name, line


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


def _at_rest(frame: FrameType) -> bool:
    """Whether a thread waits in one of the standard library's own ways, or is not the user's at all."""
    return frame.f_code.co_filename.endswith(RESTS) or frame.f_code.co_filename.startswith(_ENGINE)


def _stack(frame: FrameType) -> list[FrameType]:
    out: list[FrameType] = []
    here: FrameType | None = frame
    while here is not None and len(out) < DEEP:
        out.append(here)
        here = here.f_back
    return out


def known_transforms(dataset: Any) -> dict[Any, str]:
    """Names by code object: of what a dataset, or one inside it, keeps as its ``transform``, ``target_transform`` or
    ``transforms``, and of what such a Compose-like object or ``nn.Sequential`` lists."""
    out: dict[Any, str] = {}
    seen: set[int] = set()

    def add(thing: Any) -> None:
        if thing is None or id(thing) in seen:
            return
        seen.add(id(thing))
        listed = getattr(thing, "transforms", None)
        if listed is None and type(thing).__name__ == "Sequential":
            listed = list(thing)
        if isinstance(listed, (list, tuple)):
            for t in listed:
                add(t)
            return
        inner = getattr(thing, "transform", None)  # torchvision's StandardTransform and its like
        if inner is not None and not hasattr(thing, "__code__"):
            add(inner)
            add(getattr(thing, "target_transform", None))
        name = getattr(thing, "__name__", type(thing).__name__)
        for f in (thing, vars_of(type(thing), "__call__"), vars_of(type(thing), "forward")):
            code = getattr(f, "__code__", None)
            if code is not None and not code.co_filename.endswith(MODULE_CALL):
                out[code] = name

    def walk(d: Any) -> None:
        if d is None or id(d) in seen:
            return
        seen.add(id(d))
        for attribute in ("transform", "target_transform", "transforms"):
            thing = getattr(d, attribute, None)
            for t in thing if isinstance(thing, (list, tuple)) else [thing]:
                add(t)
        walk(getattr(d, "dataset", None))
        for inner in getattr(d, "datasets", None) or ():
            walk(inner)

    with contextlib.suppress(Exception):  # a dataset's attributes may be properties that do anything
        walk(dataset)
    return out


def vars_of(cls: type, name: str) -> Any:
    """What a class or one of its bases defines under a name, without calling anything."""
    return next((vars(c)[name] for c in cls.__mro__ if name in vars(c)), None)


def known_getters(dataset: Any) -> set[Any]:
    """Code objects of ``__getitem__`` of a dataset and of those inside it."""
    out: set[Any] = set()
    for _ in range(16):
        if dataset is None:
            break
        out.add(getattr(vars_of(type(dataset), "__getitem__"), "__code__", None))
        dataset = getattr(dataset, "dataset", None)
    return out - {None}


def transform_of(stack: list[FrameType], known: dict[Any, str]) -> str:
    """The transform that a stack is in, the outermost one, as people listed it. Empty where there is none."""
    for f in reversed(stack):
        if f.f_code in known:
            return known[f.f_code]
    for outer, inner in zip(stack[:0:-1], stack[-2::-1], strict=True):
        if _composes(outer) and not _composes(inner):
            return _class_of(stack, inner)
    leaf = stack[0]
    if _composes(leaf):  # what it calls is C and has no frame; its own variables say which one it is
        listed = getattr(leaf.f_locals.get("self"), "transforms", None) or ()
        for value in leaf.f_locals.values():
            if any(value is t for t in listed):
                return str(getattr(value, "__name__", type(value).__name__))
    return ""


def _composes(f: FrameType) -> bool:
    code = f.f_code
    return code.co_name in ("__call__", "forward") and "transforms" in code.co_names


def _class_of(stack: list[FrameType], inner: FrameType) -> str:
    """What the frame is a method of, past torch.nn's own calling convention."""
    at = stack.index(inner)
    while at > 0 and stack[at].f_code.co_filename.endswith(MODULE_CALL):
        at -= 1
    code = stack[at].f_code
    name: str = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has no qualified names here
    return name.rsplit(".", 1)[0].rsplit(".", 1)[-1].replace("<locals>", code.co_name)


def _library(path: str) -> str:
    found = DECODERS.search(path)
    return (found[1] or Path(path).stem) if found else ""


_ENGINE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_STDLIB = os.path.dirname(os.__file__) + os.sep


def _is_users(path: str) -> bool:
    inside = ("site-packages" in path) or ("dist-packages" in path) or path.startswith((_ENGINE, _STDLIB, "<"))
    return not inside


def _short(path: str) -> str:
    with contextlib.suppress(ValueError):
        relative = os.path.relpath(path)
        if not relative.startswith(".."):
            return relative
    return path
