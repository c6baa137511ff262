"""What ``/proc`` says about a process: its threads and their system calls, its descriptors, its memory (proc(5)).

Never touches a file that the process has open: a file system that does not answer would block this process as well.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ACCEPTS = 1 << 16  # a flag of a socket in /proc/net/unix: __SO_ACCEPTCON of linux/net.h


class SystemCall(NamedTuple):
    """The system call in which a thread waits."""

    number: int  # of the call; depends on the architecture
    args: tuple[int, ...]  # its six arguments
    stack: int  # the thread's stack pointer
    code: int  # the address of the instruction that made the call


@dataclass(frozen=True)
class Thread:
    """A thread at one moment."""

    id: int  # of the thread; the main thread's equals the process ID
    # R runs, S sleeps, D sleeps uninterruptibly, T is stopped, t is held by a debugger, Z has ended
    state: str
    cpu_ns: int  # CPU time used
    switches: int  # context switches, voluntary and involuntary
    call: SystemCall | None  # None if it is in no system call, or if that may not be read
    where: str  # the kernel function in which it sleeps; "" if unknown


class Descriptor(NamedTuple):
    """An open file: its path, ``pipe:[7]`` or ``socket:[8]``; whether it is open to read and to write."""

    target: str
    reads: bool
    writes: bool


class Identity(NamedTuple):
    """Identifies a process."""

    pid: int
    parent: int
    name: str  # of its main thread
    command: tuple[str, ...]  # its command line; empty once it has ended, and briefly during execve(2)
    state: str  # see ``Thread.state``
    python: bool  # whether the program is a Python interpreter or embeds one


@dataclass(frozen=True)
class Process:
    """A process at one moment."""

    pid: int
    threads: tuple[Thread, ...]
    descriptors: dict[int, Descriptor] | None  # by number; None if they may not be read
    written: int | None  # number of write system calls so far; None if it may not be read
    calls_seen: bool  # whether system calls may be read
    idle_s: float | None  # seconds since its main thread last ran; None if unknown

    @property
    def main(self) -> Thread:
        return self.threads[0]


def identify(pid: int) -> Identity | None:
    """Identifies a process; returns None if it is gone."""
    root = Path(f"/proc/{pid}")
    stat = _stat(root)
    if not stat:
        return None
    command = tuple(_read(root / "cmdline").split("\0")[:-1])
    name = _read(root / "comm").strip()
    program = command[0] if command else ""  # used if ``exe`` may not be read
    with contextlib.suppress(OSError):
        program = os.readlink(root / "exe")
    python = "python" in os.path.basename(program) or any("libpython" in path for *_, path in code(pid))
    return Identity(pid, int(stat[1]), name, command, stat[0], python)


def look(pid: int) -> Process | None:
    """Reads a process's current state; returns None if it is gone."""
    root = Path(f"/proc/{pid}")
    threads = [t for tid in _numbers(root / "task") if (t := _thread(root / "task" / str(tid), tid)) is not None]
    threads.sort(key=lambda t: t.id != pid)  # the main thread first
    if not threads or threads[0].id != pid:
        return None
    io = re.search(r"syscw: (\d+)", _read(root / "io"))
    written, calls_seen = int(io[1]) if io else None, bool(_read(root / "syscall"))
    return Process(pid, tuple(threads), _descriptors(root), written, calls_seen, _idle_s(pid))


def parents() -> dict[int, int]:
    """Returns the parent of each existing process."""
    return {pid: int(stat[1]) for pid in _numbers(Path("/proc")) if (stat := _stat(Path(f"/proc/{pid}")))}


def owner(pid: int) -> int | None:
    """Returns the effective user ID of a process; None if it is gone."""
    found = re.search(r"^Uid:\s+\d+\s+(\d+)", _read(Path(f"/proc/{pid}/status")), re.MULTILINE)
    return int(found[1]) if found else None


def handles(pid: int, signal: int) -> bool:
    """Returns whether a process handles a signal and does not block it."""
    status = _read(Path(f"/proc/{pid}/status"))
    masks = {key: int(value, 16) for key, value in re.findall(r"^Sig(Cgt|Blk):\s+(\w+)", status, re.MULTILINE)}
    bit = 1 << signal - 1
    return bool(masks.get("Cgt", 0) & bit) and not masks.get("Blk", 0) & bit


def memory(pid: int, address: int, length: int) -> bytes:
    """Reads up to ``length`` bytes of a process's memory; returns those before the first page that cannot be read."""
    with contextlib.suppress(OSError, OverflowError), open(f"/proc/{pid}/mem", "rb", buffering=0) as file:
        return os.pread(file.fileno(), length, address)
    return b""


def string(pid: int, address: int) -> str:
    """Reads the path at an address; returns "" if it cannot be read."""
    return memory(pid, address, 4096).split(b"\0")[0].decode(errors="replace")


def code(pid: int) -> list[tuple[int, int, str]]:
    """Returns the executable file mappings: first address, end, path."""
    lines = re.findall(r"^(\w+)-(\w+) ..x\S* \S+ \S+ \d+ +(/.*)$", _read(Path(f"/proc/{pid}/maps")), re.MULTILINE)
    return [(int(first, 16), int(end, 16), path) for first, end, path in lines]


def file_system(pid: int, path: str) -> str:
    """Returns the type of the file system that holds a path, such as ``nfs4``; "" if unknown."""
    best = ("", "")
    for line in _read(Path(f"/proc/{pid}/mountinfo")).splitlines():
        left, _, right = line.partition(" - ")
        point = left.split()[4]
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and right and len(point) >= len(best[0]):
            best = point, right.split()[0]
    return best[1]


def peer(pid: int, target: str) -> str:
    """Returns the address and port of the peer of a TCP connection ``socket:[8]``; "" for other sockets."""
    number = target[len("socket:[") : -1]
    for name in ("tcp", "tcp6"):
        for line in _read(Path(f"/proc/{pid}/net/{name}")).splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[9] == number and fields[2].strip("0:"):
                return _address(fields[2])
    return ""


def unix_sockets(pid: int) -> dict[str, bool]:
    """Returns the Unix sockets of a process's network namespace (``socket:[8]``), and whether each one listens."""
    lines = [line.split() for line in _read(Path(f"/proc/{pid}/net/unix")).splitlines()[1:]]
    return {f"socket:[{fields[6]}]": bool(int(fields[3], 16) & ACCEPTS) for fields in lines}


def lock_holder(pid: int) -> int | None:
    """Returns the process that holds the file lock for which ``pid`` waits (/proc/locks); None if unknown."""
    holders: dict[str, int] = {}
    for line in _read(Path("/proc/locks")).splitlines():
        fields = line.split()
        if fields[1] != "->":
            holders[fields[0]] = int(fields[4])
        elif int(fields[5]) == pid:
            return holders.get(fields[0])
    return None


def users(target: str) -> dict[int, list[Descriptor]]:
    """Returns the processes that have a file open, among those whose descriptors may be read."""
    found = {pid: _descriptors(Path(f"/proc/{pid}"), target) for pid in _numbers(Path("/proc"))}
    return {pid: list(opened.values()) for pid, opened in found.items() if opened}


def shm_free(pid: int) -> tuple[int, int] | None:
    """Returns the free bytes and the size of a process's ``/dev/shm``; None if it cannot be read."""
    try:
        stat = os.statvfs(Path("/proc", str(pid), "root", "dev", "shm"))
    except OSError:
        return None
    return stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _numbers(folder: Path) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(folder) if name.isdecimal())
    except OSError:
        return []


def _stat(root: Path) -> list[str]:
    """Returns the fields of a process's or thread's stat from its state on; none if it is gone."""
    return _read(root / "stat").rpartition(")")[2].split()


def _thread(root: Path, tid: int) -> Thread | None:
    thread = _read_thread(root, tid)
    for _ in range(3):  # the files are read one after another, and the thread may run in between
        again = _read_thread(root, tid)
        if thread is None or again is None or (thread.state, thread.switches) == (again.state, again.switches):
            break
        thread = again
    return thread


def _read_thread(root: Path, tid: int) -> Thread | None:
    fields = _stat(root)
    if not fields:
        return None
    switches = sum(map(int, re.findall(r"ctxt_switches:\s+(\d+)", _read(root / "status"))))
    spent = _read(root / "schedstat").split()  # nanoseconds; stat has ticks of 10 ms
    words = _read(root / "syscall").split()
    call = None
    if len(words) == 9:
        numbers = [int(word, 0) for word in words]
        call = SystemCall(numbers[0], tuple(numbers[1:7]), numbers[7], numbers[8])
    where = _read(root / "wchan").strip("\0\n")
    cpu_ns = int(spent[0]) if spent else (int(fields[11]) + int(fields[12])) * 10_000_000
    return Thread(tid, fields[0], cpu_ns, switches, call, "" if where == "0" else where)


def _idle_s(pid: int) -> float | None:
    """Returns the seconds since the main thread last ran. Each core has its own scheduler clock, so this thread moves
    to that core to read it."""
    stat, last_ms = _stat(Path(f"/proc/{pid}")), _last_run_ms(Path(f"/proc/{pid}/task/{pid}"))
    if not stat or last_ms is None:
        return None
    cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {int(stat[36])})
        now_ms = _last_run_ms(Path("/proc/thread-self"))
    except OSError:  # this process may not use that core
        return None
    finally:
        os.sched_setaffinity(0, cores)
    return None if now_ms is None else max(0.0, now_ms - last_ms) / 1000


def _last_run_ms(root: Path) -> float | None:
    """Returns when a thread last ran, in ms on the scheduler's clock; None if the kernel does not show it."""
    found = re.search(r"^se\.exec_start\s*:\s*([\d.]+)", _read(root / "sched"), re.MULTILINE)
    return float(found[1]) if found else None


def _descriptors(root: Path, only: str = "") -> dict[int, Descriptor] | None:
    """Returns the open files, or only those whose target is ``only``; None if they may not be read."""
    try:
        numbers = sorted(map(int, os.listdir(root / "fd")))
    except OSError:
        return None
    out = {}
    for number in numbers:
        with contextlib.suppress(OSError, KeyError, ValueError):
            target = os.readlink(root / "fd" / str(number))
            if only not in ("", target):
                continue
            info = dict(line.split(":", 1) for line in _read(root / "fdinfo" / str(number)).splitlines()[:2])
            way = int(info["flags"], 8) & os.O_ACCMODE
            out[number] = Descriptor(target, way != os.O_WRONLY, way != os.O_RDONLY)
    return out


def _address(text: str) -> str:
    """Parses an address and port such as ``0100007F:1F90``, whose words are in host byte order."""
    host, port = text.split(":")
    words = struct.pack(f"={len(host) // 8}I", *(int(host[i : i + 8], 16) for i in range(0, len(host), 8)))
    family = socket.AF_INET if len(words) == 4 else socket.AF_INET6
    return f"{socket.inet_ntop(family, words)}:{int(port, 16)}"


def only_ancestors_trace() -> bool:
    """Returns whether Yama lets a process of the same user be traced by its ancestors only."""
    return _read(Path("/proc/sys/kernel/yama/ptrace_scope")).strip() == "1"
