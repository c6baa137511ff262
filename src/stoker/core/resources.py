"""What this machine really grants: cores, memory, shared memory, page-locked memory, GPUs, pressure.

``os.cpu_count()`` and ``/proc/meminfo`` describe the host. A container may be granted less: by affinity
(sched_getaffinity(2)), by CPU quota (cgroup v2 ``cpu.max``, v1 ``cpu.cfs_quota_us``), or by a memory limit (v2
``memory.max``, v1 ``memory.limit_in_bytes``; Linux' admin-guide/cgroup-v2 and cgroup-v1/memory). Everything is read
from files within a millisecond; an unreadable value is ``None``, never an error. psutil is not used: it does not know
the cgroup, and workers and the first batch would wait for its import.
"""

from __future__ import annotations

import math
import os
import platform
import re
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .gpus import Gpu, gpus
from .types import JsonObject

NO_LIMIT = 1 << 60  # cgroup v1 says "no limit" with a number near 2**63
WORKER_BYTES = 32 << 20  # assumed for a forked worker until one is measured
LOW_SHARE = 0.05  # of the memory granted: memory is short if less is available
LOW_LEAST = 256 << 20  # bytes; the same for a small machine
SCARCE = 64  # limit of processes and threads below which they are scarce
SHM_SMALL = 256 << 20  # Docker's default is 64 MB; torch's own loader needs room for several batches


@dataclass(frozen=True)
class Machine:
    """What is granted. Bytes, unless stated otherwise."""

    cores: int  # cores granted, at least 1: the lesser of affinity and quota (rounded up)
    cores_host: int  # what ``os.cpu_count()`` says
    cores_affinity: int  # cores this process may run on
    cpu_quota: float | None  # cores' worth of CPU time granted by cgroups, or None
    memory: int  # memory granted: the lesser of the host's and the cgroups' limits
    memory_host: int  # the host's memory
    memory_limit: int | None  # the least limit of the cgroups, or None
    memory_available: int  # what could be allocated now without swapping
    swap_used: int  # swap in use on the host
    shm: int | None  # size of ``/dev/shm``; shm_free: free bytes there
    shm_free: int | None
    open_files: int | None  # limit on open descriptors
    # PSI "some avg10" per cent for cpu, memory and io, if the kernel reports it
    pressure: dict[str, float] = field(default_factory=dict)
    gpus: list[Gpu] = field(default_factory=list)  # accelerators, by NVML
    # python, platform: versions
    python: str = ""
    platform: str = ""
    warnings: list[str] = field(default_factory=list)  # what looks wrong, each with a remedy

    def as_dict(self) -> JsonObject:
        """Plain dicts and lists, for JSON."""
        return asdict(self)


def _read(path: str | Path) -> str | None:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read().decode(errors="replace")
    except OSError:
        return None


def _number(text: str | None) -> int | None:
    try:
        n = int(text.split()[0]) if text else None
    except (ValueError, IndexError):
        return None
    return n if n is not None and 0 <= n < NO_LIMIT else None


def _cgroup_dirs(controller: str, root: Path, proc: Path) -> list[str]:
    """Folders whose limits apply to this process, from its own cgroup up to the root, each ending with a slash; v1 and
    v2 mixed. Plain strings: the first batch waits for this, and with ``Path`` it takes three times as long."""
    out: list[str] = []
    for line in (_read(f"{proc}/self/cgroup") or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        _, names, path = parts
        if not names:
            bases = [f"{root}/unified/", f"{root}/"]
        elif controller in names.split(","):
            bases = [f"{root}/{controller}/", f"{root}/{names}/"]
        else:
            continue
        base = next(filter(os.path.isdir, bases), None)
        if base is None:
            continue
        # In a container the path is the host's and does not exist here: the mount's own root then counts.
        parts = [part for part in path.split("/") if part]
        levels = [base + "".join(f"{part}/" for part in parts[:n]) for n in range(len(parts), -1, -1)]
        out += filter(os.path.isdir, levels)
    return out


def cpu_quota(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> float | None:
    """Cores' worth of CPU time that cgroups grant, the least over all levels; None without a quota."""
    least: float | None = None
    for d in _cgroup_dirs("cpu", root, proc):
        quota = period = None
        if text := _read(d + "cpu.max"):
            fields = text.split()
            if len(fields) == 2 and fields[0] != "max":
                quota, period = _number(fields[0]), _number(fields[1])
        elif (text := _read(d + "cpu.cfs_quota_us")) and not text.strip().startswith("-"):
            quota, period = _number(text), _number(_read(d + "cpu.cfs_period_us"))
        if quota and period:
            least = quota / period if least is None else min(least, quota / period)
    return least


def memory_limit(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> int | None:
    """The least memory limit of the cgroups this process is in, in bytes; None without one."""
    limits = []
    for d in _cgroup_dirs("memory", root, proc):
        for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
            n = _number(_read(d + name))
            if n:
                limits.append(n)
    return min(limits, default=None)


def memory_used(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> int | None:
    """Bytes in use in this process' memory cgroup, without page cache that can be dropped."""
    for d in _cgroup_dirs("memory", root, proc):
        for name in ("memory.current", "memory.usage_in_bytes"):
            used = _number(_read(d + name))
            if used is not None:
                stat = dict(
                    line.split() for line in (_read(d + "memory.stat") or "").splitlines() if line.count(" ") == 1
                )
                cache = stat.get("inactive_file") or stat.get("total_inactive_file") or "0"
                return max(0, used - int(cache))
    return None


def oom_kills(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> int | None:
    """Number of processes in this process' memory cgroup that the out-of-memory killer has killed so far (cgroup v2's
    ``memory.events``, v1's ``memory.oom_control``); None if the kernel does not count them."""
    for d in _cgroup_dirs("memory", root, proc):
        for name in ("memory.events", "memory.oom_control"):
            for line in (_read(d + name) or "").splitlines():
                if line.startswith("oom_kill "):
                    return _number(line.removeprefix("oom_kill "))
    return None


def _sizes(path: str) -> dict[str, int]:
    """The lines ``Name: 12 kB`` of a file, in bytes."""
    lines = (line.split() for line in (_read(path) or "").splitlines())
    return {words[0][:-1]: int(words[1]) << 10 for words in lines if words[2:] == ["kB"]}


def _host_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


def _limit(name: str) -> int | None:
    try:
        import resource

        soft, _ = resource.getrlimit(getattr(resource, name))
    except (ImportError, AttributeError, OSError):
        return None
    return None if soft < 0 or soft >= NO_LIMIT else soft


def pressure() -> dict[str, float]:
    """PSI "some avg10", per cent, for cpu, memory and io (the kernel's accounting/psi.rst); empty without."""
    found = {what: _psi(Path("/proc/pressure") / what) for what in ("cpu", "memory", "io")}
    return {what: float(some["avg10"]) for what, some in found.items() if some}


def memory_stalled(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> int | None:
    """Microseconds so far in which some task waited for memory (PSI): in this process' cgroup if the kernel counts per
    cgroup (v2), else on the machine; None without PSI."""
    own = [d + "memory.pressure" for d in _cgroup_dirs("memory", root, proc)[:1]]
    some = next(filter(None, map(_psi, (*own, f"{proc}/pressure/memory"))), {})
    return _number(some.get("total"))


def _psi(file: str | Path) -> dict[str, str]:
    """The "some" line of a PSI file; empty if it cannot be read."""
    for line in (_read(file) or "").splitlines():
        if line.startswith("some"):
            return dict(word.split("=") for word in line.split()[1:])
    return {}


def cores_granted() -> int:
    """Cores this process may use at once: the least of affinity and CPU quota, at least 1."""
    quota = cpu_quota()
    return max(1, min(_affinity(), math.ceil(quota) if quota else 1 << 30))


def memory_granted() -> int:
    """Bytes of memory this process may use: the least of the host's and the cgroups' limits."""
    host, limit = _host_memory(), memory_limit()
    return min(host, limit) if limit else host


def ranks() -> int:
    """Processes of one distributed run on this machine, which share its cores and memory; 1 without such a run.
    Launchers set it in the environment: torchrun and tools based on it, Open MPI, Slurm. Without a launcher (Lightning,
    ``torch.multiprocessing.spawn``), all ranks are on this machine if they meet at a loopback address."""
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE"):
        found = re.match(r"[1-9]\d*", os.environ.get(name, ""))
        if found:
            return int(found[0])
    if os.environ.get("MASTER_ADDR") not in ("localhost", "127.0.0.1", "::1"):
        return 1
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return max(1, int(distributed.get_world_size()))
    world = os.environ.get("WORLD_SIZE", "1") if "LOCAL_RANK" in os.environ else "1"
    return max(1, int(world)) if world.isdecimal() else 1


def memory_of_rank() -> int:
    """This process' share of the memory granted; the other ranks of this machine have the rest."""
    return memory_granted() // ranks()


def memory_available() -> int:
    """Bytes that could be allocated now without swapping."""
    available = _sizes("/proc/meminfo").get("MemAvailable", _host_memory())
    limit, used = memory_limit(), memory_used()
    if limit and used is not None:
        available = min(available, max(0, limit - used))
    return available


def memory_low() -> int:
    """Bytes that must stay available: a twentieth of the memory granted, at least 256 MB, but at most a quarter."""
    granted = memory_granted()
    return min(granted // 4, max(LOW_LEAST, int(LOW_SHARE * granted)))


def workers_bound(each: int) -> tuple[int, str]:
    """Upper bound for workers of ``each`` bytes in this process, and a description of the limit that sets it."""
    available, n = memory_available(), ranks()
    words = f"{available >> 20:,} MB of memory are free and each worker takes {each >> 20:,} MB"
    bounds = [(available // (max(1, each) * n), words if n == 1 else f"{words} in each of {n} ranks")]
    files = _limit("RLIMIT_NOFILE")
    if files is not None:
        bounds.append(((files - 64) // 8, f"{files:,} open files are allowed and each worker takes up to 8"))
    processes = _limit("RLIMIT_NPROC")
    if processes is not None:
        bounds.append((processes - 1, f"{processes:,} processes are allowed"))
    return min(bounds)


def threads_are_scarce() -> bool:
    """Whether the user may have so few processes and threads (``ulimit -u``) that stoker avoids optional ones: a script
    may need the last."""
    most = _limit("RLIMIT_NPROC")
    return most is not None and most < SCARCE


def pss(pid: int | str = "self") -> int:
    """Proportional set size of a process: shared pages are divided by the number of processes that share them (proc(5),
    smaps_rollup). 0 if the system does not report it."""
    return pss_and_private(pid)[0]


def pss_and_private(pid: int | str = "self") -> tuple[int, int]:
    """Like ``pss``, plus bytes private to the process. Those exclude pages shared since a fork, files, and shared
    memory, even if no other process maps it at the moment. Reading them walks the page tables: milliseconds."""
    found = _sizes(f"/proc/{pid}/smaps_rollup")
    own = found.get("Private_Clean", 0) + found.get("Private_Dirty", 0)
    return found.get("Pss", 0), max(0, own - found.get("Pss_File", 0) - found.get("Pss_Shmem", 0))


def shm_free() -> int | None:
    """Bytes free in /dev/shm; None if there is none."""
    found = _shm()
    return None if found is None else found.f_bavail * found.f_frsize


def _shm() -> os.statvfs_result | None:
    try:
        return os.statvfs("/dev/shm")
    except OSError:
        return None


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def read() -> Machine:
    """Reads everything afresh."""
    info, shm = _sizes("/proc/meminfo"), _shm()
    machine = Machine(
        cores=cores_granted(),
        cores_host=os.cpu_count() or 1,
        cores_affinity=_affinity(),
        cpu_quota=cpu_quota(),
        memory=memory_granted(),
        memory_host=_host_memory(),
        memory_limit=memory_limit(),
        memory_available=memory_available(),
        swap_used=info.get("SwapTotal", 0) - info.get("SwapFree", 0),
        shm=None if shm is None else shm.f_blocks * shm.f_frsize,
        shm_free=shm_free(),
        open_files=_limit("RLIMIT_NOFILE"),
        pressure=pressure(),
        gpus=gpus(),
        python=platform.python_version(),
        platform=f"{sys.platform} {platform.release()} {platform.machine()}",
    )
    machine.warnings.extend(_wrong(machine))
    return machine


def _wrong(m: Machine) -> list[str]:
    out = []
    if m.cpu_quota is not None and m.cpu_quota < m.cores_affinity:
        out.append(
            f"a CPU quota grants {m.cpu_quota:g} of the {m.cores_affinity} cores that os.cpu_count() and torch show: "
            f"use at most {m.cores} workers, or raise the quota"
        )
    if m.shm is not None and m.shm < SHM_SMALL:
        out.append(
            f"/dev/shm has {m.shm >> 20} MB: torch's own loader will fail with a bus error on large batches (docker "
            "run --shm-size=1g); stoker does not use it"
        )
    if m.memory_available < m.memory // 10:
        out.append(
            f"only {m.memory_available >> 20} MB of {m.memory >> 20} MB of memory are free: use fewer workers or a "
            "smaller prefetch_factor"
        )
    if m.swap_used > m.memory_host // 20:
        out.append(f"{m.swap_used >> 20} MB are swapped out: memory is too small for what runs here")
    for what, share in m.pressure.items():
        if share >= 10:
            out.append(
                f"tasks stalled on {what} for {share:.0f} % of the last 10 s (PSI): the machine is shared or has too "
                f"little {what}"
            )
    if m.open_files is not None and m.open_files < 1024:
        out.append(f"only {m.open_files} open files are allowed: raise the limit with ulimit -n 4096")
    return out
