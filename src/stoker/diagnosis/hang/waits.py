"""What one thread waits for, in words and as data, from its system call and the call's arguments.

If system calls may not be read, the kernel function in which the thread sleeps tells part of it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import struct
import time
from dataclasses import dataclass

from . import proc
from .proc import Process, SystemCall, Thread

MACHINES = ("x86_64", "aarch64")
# System call numbers on each of the machines, from asm/unistd_64.h and asm-generic/unistd.h.
CALLS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "read": ((0, 17, 19, 295), (63, 67, 65, 69)),
    "write": ((1, 20, 18), (64, 66, 68)),
    "open": ((2, 4, 6, 21, 89, 80), ()),
    "openat": ((257, 262, 269, 332, 267), (56, 79, 48, 291, 78)),
    "poll": ((7, 271), (73,)),
    "select": ((23, 270), (72,)),
    "epoll": ((232, 281, 441), (22, 441)),
    "sleep": ((35,), (101,)),
    "clock_nanosleep": ((230,), (115,)),
    "receive": ((45, 47, 42), (207, 212, 203)),
    "accept": ((43, 288), (202, 242)),
    "send": ((44, 46), (206, 211)),
    "wait4": ((61,), (260,)),
    "waitid": ((247,), (95,)),
    "flock": ((73, 72), (32, 25)),
    "file": ((74, 75, 217, 5, 16), (82, 83, 61, 80, 29)),
    "futex": ((202,), (98,)),
}
# Parts of kernel function names, for calls that may not be read or were resumed after a signal (restart_syscall(2)).
SLEEPS_IN = {"futex": "futex", "poll": "poll", "nanosleep": "clock_nanosleep", "pipe": "read", "do_wait": "wait4"}
# Calls that may wait for a file system, and kernel functions that wait for a file server, not always in state D.
ON_FILES = ("open", "openat", "read", "write", "file")
SERVERS = re.compile(r"fuse|request_wait_answer|nfs|rpc_wait|ceph|cifs|smb")
POOLS = re.compile(r"lib(gomp|iomp5|omp|openblas\w*|mkl\w*|tbb|opencv\w*|grpc\w*)\b|cv2\b")
INTERPRETER = re.compile(r"/(libpython|python)[\d.]*[^/]*$")
FUTEX_PRIVATE, FUTEX_REALTIME = 128, 256  # linux/futex.h
FUTEX_WAITS = {0: False, 9: True}  # FUTEX_WAIT and FUTEX_WAIT_BITSET: whether the timeout is an absolute time
STACK_BYTES = 1024  # bytes of a thread's stack that are searched for callers


@dataclass(frozen=True)
class Wait:
    """What a thread waits for."""

    # runs, ended, stopped, debugged, lock, sleep, pipe, fifo, terminal, socket, file, storage, file lock, child,
    # events, connection, or other
    kind: str
    text: str  # the wait in words that follow a process's name: "waits for a lock"
    left_s: float | None = None  # seconds until it ends by itself; None: unknown, or it does not
    reads: tuple[str, ...] = ()  # targets from which it wants to read
    writes: tuple[str, ...] = ()  # targets to which it wants to write
    path: str = ""  # of the file
    forever: bool = False  # for a lock: the wait has no time limit
    private: bool = False  # for a lock: no other process can release it
    library: str = ""  # for a lock: the library that waits, for threads of its own
    pid: int | None = None  # the process it waits for


STATES = {
    "R": Wait("runs", "runs"),
    "T": Wait("stopped", "is stopped by a signal"),
    "t": Wait("debugged", "is held by a debugger"),
    "Z": Wait("ended", "has ended"),
    "X": Wait("ended", "has ended"),
}
WITHOUT_ARGUMENTS = {
    "poll": Wait("pipe", "waits for a pipe or a socket"),
    "clock_nanosleep": Wait("sleep", "sleeps"),
    "read": Wait("pipe", "waits for a pipe"),
    "wait4": Wait("child", "waits for a process to end"),
}


def wait_of(process: Process, thread: Thread) -> Wait:
    if thread.state in STATES:
        return STATES[thread.state]
    call = thread.call
    name = _name(thread)
    storage = _storage(process, thread, name)
    if storage is not None:
        return storage
    if name == "futex":
        return _lock(process.pid, call)
    if call is None or not name:
        other = Wait("other", f"waits in the kernel{thread.where and f', {thread.where}'}")
        return WITHOUT_ARGUMENTS.get(name, other)
    if name in ("sleep", "clock_nanosleep"):
        return _sleep(_time_left(process.pid, name, call))
    if name in ("poll", "select"):
        return _poll(process, name, call)
    if name in ("wait4", "waitid"):
        pid = ctypes.c_int(call.args[0 if name == "wait4" else 1]).value
        text = f"waits for process {pid} to end" if pid > 0 else "waits for a process to end"
        return Wait("child", text, pid=pid if pid > 0 else None)
    if name == "accept":
        return Wait("connection", "waits for a connection")
    if name == "epoll":
        return Wait("events", "waits for events")
    return _on_file(process, thread, name, call)


def _storage(process: Process, thread: Thread, name: str) -> Wait | None:
    faults = thread.state == "D" and thread.call is None and not name  # a page fault reads from a mapped file
    if not faults and (name not in ON_FILES or not (thread.state == "D" or SERVERS.search(thread.where))):
        return None
    path = _path(process, name, thread.call)
    return Wait("storage", f"waits for storage{path and f': {path}'}", path=path)


def deadlocked(process: Process) -> bool:
    """Returns whether every thread of a process waits, without a timeout, for a lock that only this process can
    release. Ignores threads that wait for connections, because they serve other processes: torch's workers have one
    for their shared memory."""
    main, *others = [wait_of(process, t) for t in process.threads]
    released = [w for w in others if w.kind != "connection"]
    return all(w.kind == "lock" and w.private and w.forever for w in (main, *released))


def _name(thread: Thread) -> str:
    machine = platform.machine()
    if thread.call is not None and machine in MACHINES:
        at = MACHINES.index(machine)
        for name, numbers in CALLS.items():
            if thread.call.number in numbers[at]:
                return name
    return next((name for part, name in SLEEPS_IN.items() if part in thread.where), "")


def _lock(pid: int, call: SystemCall | None) -> Wait:
    if call is None:
        return Wait("lock", "waits for a lock")
    _, op, _, limit = call.args[:4]
    private = bool(op & FUTEX_PRIVATE)
    left_s = None
    if limit:
        left_s = _timespec(pid, limit)
        if left_s is not None and FUTEX_WAITS.get(op & 0x7F):
            left_s = max(0.0, left_s - (time.time() if op & FUTEX_REALTIME else time.monotonic()))
    library = "" if limit else _library(pid, call)
    text = "waits for a lock" if private else "waits for a lock that processes share"
    if library:
        text = f"waits for threads of {library}"
    return Wait("lock", text, left_s, forever=not limit, private=private, library=library)


def _library(pid: int, call: SystemCall) -> str:
    """Returns the library with its own threads that made the call, or that called its maker; "" if Python comes first.
    Treats every word on the stack that is an address of code as a caller."""
    mappings = proc.code(pid)
    words = proc.memory(pid, call.stack, STACK_BYTES)
    addresses = struct.unpack(f"{len(words) // 8}Q", words[: len(words) // 8 * 8])
    for address in (call.code, *addresses):
        path = next((path for first, end, path in mappings if first <= address < end), "")
        if INTERPRETER.search(path):
            return ""
        if POOLS.search(os.path.basename(path)):
            return os.path.basename(path).split(".so")[0].split("-")[0]
    return ""


def _sleep(left_s: float | None) -> Wait:
    return Wait("sleep", "sleeps" if left_s is None else f"sleeps for another {left_s:,.0f} s", left_s=left_s)


def _time_left(pid: int, name: str, call: SystemCall) -> float | None:
    if name == "sleep":
        return _timespec(pid, call.args[0])  # the duration requested: time already slept is not subtracted
    clock, flags, address = call.args[:3]
    left_s = _timespec(pid, address)
    if left_s is None or not flags & 1:  # TIMER_ABSTIME
        return left_s
    return max(0.0, left_s - time.clock_gettime(clock))


def _timespec(pid: int, address: int) -> float | None:
    found = proc.memory(pid, address, 16)
    if len(found) < 16:
        return None
    seconds, nanoseconds = struct.unpack("qq", found)
    return float(seconds + nanoseconds / 1e9)


def _poll(process: Process, name: str, call: SystemCall) -> Wait:
    """Handles poll(2), ppoll(2), select(2) and pselect(2); a select without descriptors is a sleep."""
    if name == "poll":
        count = min(call.args[1], 4096)
        found = proc.memory(process.pid, call.args[0], 8 * count)
        wanted = [fd for fd, _, _ in struct.iter_unpack("ihh", found[: len(found) // 8 * 8])]
    else:
        count = min(call.args[0], 1024)
        if count == 0:
            return _sleep(_timespec(process.pid, call.args[4]))
        bits = int.from_bytes(proc.memory(process.pid, call.args[1], 128), "little")
        wanted = [fd for fd in range(count) if bits >> fd & 1]
    table = process.descriptors or {}
    targets = tuple(dict.fromkeys(table[fd].target for fd in wanted if fd in table))
    if targets and all(target.startswith("socket:") for target in targets):
        return Wait("socket", f"waits for {_described(process.pid, targets[0])}", reads=targets)
    return Wait("pipe", "waits for a pipe", reads=targets)


def _described(pid: int, target: str) -> str:
    address = proc.peer(pid, target)
    return f"an answer of {address}" if address else "a socket"


def _on_file(process: Process, thread: Thread, name: str, call: SystemCall) -> Wait:
    path = _path(process, name, call)
    reads = (path,) if name in ("read", "receive") else ()
    writes = (path,) if name in ("write", "send") else ()
    if path.startswith("pipe:"):
        return Wait("pipe", "writes to a pipe" if writes else "waits for a pipe", reads=reads, writes=writes)
    if path.startswith("socket:"):
        text = "sends to a socket" if writes else f"waits for {_described(process.pid, path)}"
        return Wait("socket", text, reads=reads, writes=writes)
    if "pipe" in thread.where or "fifo" in thread.where or "partner" in thread.where:  # wait_for_partner
        verb = "opens" if name in ("open", "openat") else "writes to" if writes else "reads"
        return Wait("fifo", f"{verb} the named pipe {path}", reads=reads, writes=writes, path=path)
    if name == "flock":
        return Wait("file lock", f"waits for the lock on {path}", path=path, pid=proc.lock_holder(process.pid))
    if path.startswith(("/dev/pts/", "/dev/tty")):
        return Wait("terminal", "waits for input at the terminal", path=path)
    return Wait("file", f"waits for {path or 'a file'}", path=path)


def _path(process: Process, name: str, call: SystemCall | None) -> str:
    """Returns the path that a call names, or the target of the descriptor it is given; "" for other calls."""
    if call is None or name not in ("open", "openat", "read", "write", "receive", "send", "flock", "file"):
        return ""
    if name in ("open", "openat"):
        return proc.string(process.pid, call.args[0 if name == "open" else 1])
    found = (process.descriptors or {}).get(ctypes.c_int(call.args[0]).value)
    return found.target if found else ""
