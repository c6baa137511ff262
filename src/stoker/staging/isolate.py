"""Runs a function in a forked child that can change nothing outside itself.

The child has its own copy of memory. Before the function runs, it gives up what a fork still shares:

    file offsets        regular files are reopened, read-only
    connections, pipes  are replaced by closed ones; new ones are refused, except for a dataset that names servers
    shared memory       is mapped read-only
    the file system     an audit hook refuses to open files for writing; for native code Landlock does so, if the
                        kernel has it
    output              what is printed, logged or written to open files goes to a file in memory (``output_size``)
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import logging
import math
import mmap
import os
import pickle
import re
import select
import signal
import socket
import stat
import struct
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, Generic, TypeVar

import torch

from ..core import packages, processes
from ..core.errors import StokerError, UsageError, one_line
from ..transport.slots import own_fork
from .store.memory import MemoryTables
from .users_code import is_users_code, is_users_module

T = TypeVar("T")
DIED = {
    signal.SIGSEGV: "the trial's process died: a sample writes to shared memory, or native code crashed",
    signal.SIGBUS: "the trial's process died: a sample writes to shared memory, or native code crashed",
    signal.SIGKILL: "the trial's process was killed: there was not enough memory, or it took too long",
}
MAP_FIXED = 0x10
PR_SET_NO_NEW_PRIVS = 38
NICE = 5  # the trial yields to the script's own work
MOST_FILES = 32  # maximum number of files recorded as read
MOST_NAMES = 1000  # maximum number of names recorded in one folder
NO_DATA = ("/proc/", "/sys/", "/dev/", "/etc/")
SHARED_MEMORY = "/dev/shm/"
TIME = struct.Struct("<cd")  # the child's first message: a mark, with which no pickle begins, and seconds
TIME_MARK = b"t"
LOOKS = ("stat", "lstat", "access")  # functions of ``os`` that raise no audit event
EVERYTHING = "*"  # stands for all names of a folder that was listed
RANDOM_FILES = ("/dev/urandom", "/dev/random", "/dev/hwrng", "/proc/uptime", "/proc/loadavg")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
EFFECTS = {  # audit events, by effect
    "deletes files": ("os.remove", "os.rmdir", "shutil.rmtree"),
    "renames a file": ("os.rename",),
    "makes a directory": ("os.mkdir",),
    "makes a link": ("os.link", "os.symlink"),
    "writes to a file": ("os.truncate",),
    "sends a signal": ("os.kill",),
    "forks": ("os.fork", "os.forkpty"),
    "starts a program": ("os.system", "os.posix_spawn", "subprocess.Popen"),
    "connects to a server": ("socket.connect",),
    "opens a server": ("socket.bind",),
}
REFUSED = {event: effect for effect, events in EFFECTS.items() for event in events}


class SideEffect(UsageError):
    """The function would change something outside its process."""


class Trial(Generic[T]):
    """Runs a function in a child process, which sends its result as a pickle. After ``limit_s`` the kernel kills it."""

    memories: Sequence[MemoryTables] = ()  # the node's memory for the cache, if its ranks share one
    sample_s = math.inf  # seconds for the first sample, once the child has made it; see ``tell_sample_time``

    def __init__(self, fn: Callable[[], T], limit_s: float, waits: bool = False) -> None:
        """``waits``: a batch waits for the trial, so it does not yield to other processes."""
        self._parts: list[bytes] = []
        self._reader, writer = os.pipe2(os.O_CLOEXEC)
        with own_fork():
            self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._reader)
                _child(fn, writer, limit_s, 0 if waits else NICE)
            finally:
                os._exit(0)
        os.close(writer)
        self._process = os.getpid()
        self._ended = "the trial run was stopped, because it took too long or is no longer needed"

    def wait(self, seconds: float) -> bool:
        """Waits up to ``seconds`` for the child's answer or end. Returns whether it came."""
        if self._reader < 0:
            return True
        until = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self._reader, select.POLLIN | select.POLLHUP)
        while poll.poll(max(0.0, 1000 * (until - time.monotonic()))):
            part = os.read(self._reader, 1 << 20)
            if not part:
                self._ended = self._why_it_ended()
                self.close()
                return True
            self._parts.append(part)
            if part.startswith(TIME_MARK) and len(self._parts) == 1:
                self.sample_s = TIME.unpack_from(part)[1]
                self._parts = [part[TIME.size :]]
        return False

    def result(self) -> T:
        """Returns the function's result, once ``wait`` returned True. Raises UsageError if it or the child failed."""
        if not any(self._parts):
            raise UsageError(self._ended)
        try:
            kind, value = pickle.loads(b"".join(self._parts))
        except (EOFError, pickle.UnpicklingError):
            raise UsageError("the trial's process was killed while sending its result") from None
        if kind == "error":
            raise UsageError(value)
        made: T = value
        return made

    def close(self) -> None:
        """Kills the child, whatever it is doing."""
        if self._reader < 0 or os.getpid() != self._process:
            return
        os.close(self._reader)
        self._reader = -1
        processes.kill(self._pid)

    def _why_it_ended(self) -> str:
        with contextlib.suppress(OSError):  # its end of the pipe closes a moment before it exits
            found = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
            if found is not None and found.si_status in DIED:
                return DIED[signal.Signals(found.si_status)]
        return "the trial's process died"


def run_isolated(fn: Callable[[], T], limit_s: float = 60.0, waits: bool = False) -> T:
    """Calls ``fn`` in a child process and returns its result; on systems other than Linux, calls it directly. Raises
    UsageError if ``fn`` raised an error, took too long, or would have changed something outside, or the child died."""
    if sys.platform != "linux":
        return fn()
    trial = Trial(fn, limit_s, waits)
    try:
        trial.wait(limit_s + 1)
        return trial.result()
    finally:
        trial.close()


def tell_sample_time(seconds: float) -> None:
    """Tells the parent of this child how long a sample took, the first time. Elsewhere it does nothing."""
    global _writer
    if _writer >= 0:
        os.write(_writer, TIME.pack(TIME_MARK, seconds))
        _writer = -1


def _child(fn: Callable[[], object], writer: int, limit_s: float, nice: int) -> None:
    global _writer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    deadline()(limit_s)
    processes.die_with_parent()
    with contextlib.suppress(OSError):
        os.nice(nice)
    torch.set_num_threads(1)  # OpenMP's threads exist only in the parent
    gc.freeze()  # a collection would traverse all objects of the script: 50 ms after importing torch
    threading.excepthook = lambda _: None
    try:
        _record_looks()
        unshare({writer})
        _protect_shared_memory()
        _writer = writer
        sys.addaudithook(_refuse)
        with contextlib.suppress(OSError, AttributeError):
            _forbid_writing()
        answer: tuple[str, object] = ("value", fn())
    except StokerError as e:
        answer = ("error", str(e))
    except BaseException as e:
        answer = ("error", one_line(e))
    if _effects:
        answer = ("error", _effects[0])
    data = pickle.dumps(answer)
    while data:
        data = data[os.write(writer, data) :]


def deadline() -> Callable[[float], None]:
    """Returns a function: the kernel kills this process after so many seconds; 0: not. SIGALRM may be the user's."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "timer_create"):  # glibc < 2.34
        libc = ctypes.CDLL("librt.so.1")
    event = ctypes.create_string_buffer(struct.pack("=Qii", 0, signal.SIGKILL, 0), 64)  # sigevent(3type): SIGEV_SIGNAL
    timer = ctypes.c_void_p()
    if libc.timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(timer)):
        return lambda seconds: None

    def end_after(seconds: float) -> None:
        whole = int(seconds)
        until = struct.pack("@4l", 0, 0, whole, int((seconds - whole) * 1e9))  # itimerspec(3type): once
        libc.timer_settime(timer, 0, until, None)

    return end_after


_effects: list[str] = []
_refused = dict(REFUSED)
_read: dict[str, None] = {}
_places: dict[str, set[str]] = {}
_unpickled: set[tuple[str, str]] = set()
_output = -1
_streams: list[object] = []
_writer = -1  # of this child's pipe to its parent


def output_size() -> int:
    """Bytes that this child has printed, logged, or written to previously opened files."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    return os.fstat(_output).st_size if _output >= 0 else 0


def files_read() -> list[str]:
    """The first files that this child has opened, except Python's own. Files opened by native code are not seen."""
    return list(_read)


def places() -> dict[str, set[str]]:
    """Folders and names that samples made by this child have opened, listed or asked for, whether they exist or not.
    ``EVERYTHING`` is among the names of a folder that was listed."""
    return _places


def _record_looks() -> None:
    """Has functions that ask for a file without opening it tell ``places``."""
    packages.libraries()  # looks at files, too
    for name in LOOKS:
        setattr(os, name, _recording(getattr(os, name)))


def _recording(look: Callable[..., T]) -> Callable[..., T]:
    @functools.wraps(look)
    def recorded(path: object, *args: object, **kwargs: object) -> T:
        if isinstance(path, (str, bytes, os.PathLike)) and kwargs.get("dir_fd") is None:
            _note(os.fsdecode(path))
        return look(path, *args, **kwargs)

    return recorded


def _note(path: str, name: str = "") -> None:
    """Records what a sample looked at. ``name``: within a folder; "" for the path itself."""
    if "\0" in path or not _by_sample():
        return
    path = os.path.join(os.path.abspath(path), name) if name else os.path.abspath(path)
    if (path.startswith(NO_DATA) and not path.startswith(SHARED_MEMORY)) or packages.installed(path):
        return
    folder, name = os.path.split(path)
    names = _places.setdefault(folder, set())
    if len(names) < MOST_NAMES:
        names.add(name)


def _by_sample() -> bool:
    """Whether the caller is neither stoker nor the standard library on its behalf."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__ and not file.startswith("<frozen ") and not packages.in_stdlib(file):
            return not file.startswith(packages.OWN)
        frame = frame.f_back
    return True


def classes_unpickled() -> set[tuple[str, str]]:
    """Module and name of the user's classes and functions that pickles referenced in this child."""
    return {(module, name) for module, name in _unpickled if is_users_module(sys.modules.get(module))}


def _refuse(event: str, args: Any) -> None:
    """Audit hook (PEP 578) that refuses effects outside the process."""
    if event == "open":
        if args[0] not in (os.devnull, None) and not isinstance(args[0], int):
            _check_open(*args)
    elif event in ("os.listdir", "os.scandir"):
        if isinstance(args[0], (str, bytes, os.PathLike)) or args[0] is None:
            _note(os.fsdecode(args[0] or "."), EVERYTHING)
    elif event == "pickle.find_class":
        _unpickled.add(args)
    elif event in _refused and not (event == "os.truncate" and _is_memory(args[0])):
        if event != "os.mkdir":
            _stop(_refused[event])
        elif not os.path.exists(args[0]):  # otherwise it creates none: ``os.makedirs(path, exist_ok=True)``
            _stop(f"{_refused[event]}, {os.fsdecode(args[0])!r}{_in_library()}")


def _check_open(path: str | bytes, mode: object, flags: object) -> None:
    if (isinstance(flags, int) and flags & WRITES) or (isinstance(mode, str) and set(mode) & set("wax+")):
        _stop(f"opens {path!r} for writing")
    name = os.path.abspath(os.fsdecode(path))
    if name in RANDOM_FILES or (name.startswith(("/proc/", "/sys/")) and _by_user()):
        _stop(f"reads {name}")
    if name.endswith((".py", ".pyc", ".so")) or (name.startswith(NO_DATA) and not name.startswith(SHARED_MEMORY)):
        return
    _note(name)
    if len(_read) < MOST_FILES:
        _read[name] = None


def allow_connections() -> None:
    """Allows this child to connect to servers, because loading a sample openly does. Call only in a child."""
    _refused.pop("socket.connect", None)


def _is_memory(file: object) -> bool:
    """Whether a descriptor is an anonymous memory file, as stoker's own stores are (memfd_create(2))."""
    return isinstance(file, int) and "memfd:" in os.readlink(f"/proc/self/fd/{file}")


def _by_user() -> bool:
    """Whether the user's code opens a file, directly or through the standard library."""
    frame = sys._getframe(3)  # skips the audit hook
    while frame.f_back is not None and packages.in_stdlib(frame.f_code.co_filename):
        frame = frame.f_back
    return is_users_code(frame.f_code)


def _in_library() -> str:
    """Names the installed package whose code is running, in words; "" if none."""
    frame = sys._getframe(2)  # skips the audit hook
    while frame.f_back is not None and not frame.f_code.co_filename.startswith(packages.PACKAGE):
        file = frame.f_code.co_filename
        package = "" if packages.in_stdlib(file) else packages.installed(file).partition(os.sep)[0]
        if package:
            return f" ({package} does: call it once before creating the loader)"
        frame = frame.f_back
    return ""


def _stop(effect: str) -> None:
    _effects.append(f"loading a sample {effect}")
    raise SideEffect(_effects[0])


def unshare(keep: Collection[int]) -> None:
    """Replaces the files and connections that a forked child shares with its parent, and drops what it prints, warns of
    or logs. ``keep``: descriptors to leave alone."""
    global _output
    # A handler may be the script's.
    logging.Logger.handle = lambda *_: os.write(_output, b"logged")  # type: ignore[assignment,method-assign]
    warnings.showwarning = lambda *_, **__: None
    null = os.open(os.devnull, os.O_RDWR)
    _output = os.memfd_create("output")
    dead, other = socket.socketpair()
    other.close()
    os.dup2(null, 0)
    for fd in (1, 2):
        os.dup2(_output, fd)
    _streams.extend((sys.stdout, sys.stderr))  # destroyed, they would write what the parent has in their buffers
    sys.stdout = sys.stderr = os.fdopen(os.dup(_output), "w", 1, "utf-8", "replace")
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd in (0, 1, 2, *keep, null, _output, sys.stdout.fileno(), dead.fileno()):
            continue
        with contextlib.suppress(OSError):
            mode = os.fstat(fd).st_mode
            if stat.S_ISREG(mode):
                _reopen(fd)
            elif stat.S_ISSOCK(mode):
                os.dup2(dead.fileno(), fd, inheritable=False)
            elif stat.S_ISFIFO(mode):
                os.dup2(null, fd, inheritable=False)


def _reopen(fd: int) -> None:
    """Gives a regular file its own offset, read-only. A write-only file is redirected to the in-memory output file."""
    with open(f"/proc/self/fdinfo/{fd}") as info:
        found = dict(line.split(":", 1) for line in info if ":" in line)
    if "memfd:" in os.readlink(f"/proc/self/fd/{fd}"):
        return
    flags = int(found["flags"], 8)
    if flags & os.O_ACCMODE == os.O_WRONLY or flags & os.O_APPEND:
        os.dup2(_output, fd, inheritable=False)
        return
    new = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    os.lseek(new, int(found["pos"]), os.SEEK_SET)
    os.dup2(new, fd, inheritable=False)
    os.close(new)


def _forbid_writing() -> None:
    """Has the kernel refuse to write, create and remove files (Landlock): native code raises no audit events."""
    libc = ctypes.CDLL(None, use_errno=True)
    rights = sum(1 << bit for bit in (1, *range(4, 13)))  # LANDLOCK_ACCESS_FS_: WRITE_FILE, REMOVE_DIR to MAKE_SYM
    handled = ctypes.c_uint64(rights)
    rules = libc.syscall(444, ctypes.byref(handled), ctypes.c_size_t(8), 0)  # landlock_create_ruleset
    if rules < 0:
        return
    null = os.open(os.devnull, os.O_PATH | os.O_CLOEXEC)
    allowed = struct.pack("=Qi", 1 << 1, null)
    libc.syscall(445, rules, 1, allowed, 0)  # landlock_add_rule
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
        libc.syscall(446, rules, 0)  # landlock_restrict_self
    os.close(rules)
    os.close(null)


def _protect_shared_memory() -> None:
    """Makes writable shared mappings read-only: a write kills this process instead of reaching others. Semaphores
    become private copies, because even reading a ``multiprocessing.Value`` takes its lock."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    with open("/proc/self/maps") as maps:
        lines = maps.readlines()
    for line in lines:
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw.s \S+ \S+ \S+\s*(.*)", line)
        if found and not found[3].startswith("/dev/nvidia"):
            start, size = int(found[1], 16), int(found[2], 16) - int(found[1], 16)
            if not found[3].startswith("/dev/shm/sem."):  # sem_open(3)
                libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.PROT_READ)
                continue
            content = ctypes.string_at(start, size)
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
            rights = mmap.PROT_READ | mmap.PROT_WRITE
            libc.mmap(ctypes.c_void_p(start), ctypes.c_size_t(size), rights, flags, -1, ctypes.c_long(0))
            ctypes.memmove(start, content, size)
