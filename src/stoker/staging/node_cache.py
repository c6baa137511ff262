"""One trial and one in-memory cache for all ranks of a node that have the same dataset.

1. Each rank derives a name from a digest of its dataset, for a socket in the folder of ``stoker run``, which only
   this user may enter (``core.private_sockets``).
2. The first rank binds the socket (``_Owner``), runs the trial, and then creates the memory.
3. Every other rank connects (``_Member``) and waits. It receives the trial's result, as JSON, and the memory's
   descriptor (SCM_RIGHTS).
4. A rank whose owner has ended runs its own trial.

Nothing that is received or in the memory is ever unpickled. If samples contain an object that can only be pickled, each
rank has its own memory. The memory has no name: ranks that map it keep it, and the next rank creates a new one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from ..core import private_sockets, resources
from ..core.errors import StokerError, UsageError
from ..core.types import Batch, Index, MapDataset
from . import plain
from .change_watch import UNCHANGED, Changing
from .inputs import Inputs
from .isolate import Trial, run_isolated
from .memoize import table_for
from .open_store import ram_budget
from .plan import globals_now
from .store.memory import MemoryTables
from .store.store import Store, size_of
from .trial import TrialResult, find_plan

# Attributes that distinguish ranks. They may differ unless the deterministic part reads them.
OF_RANK = frozenset({"rank", "local_rank", "global_rank", "node_rank", "process_index", "local_process_index", "gpu"})
DIGEST_S = 1.5  # time limit for a dataset's digest; if it takes longer, the cache is not shared
CONNECT_S = 1.0
HEADER = struct.Struct("<q")  # number of bytes that follow

_sockets: list[socket.socket] = []


def new_memories(samples: int, sites: int | None, budget: int, ranks: int) -> tuple[MemoryTables, ...]:
    """Creates memory for an empty cache shared by several processes: for its store and, if results of ``sites`` call
    sites are cached, for the table of calls. Raises OSError if the system has no such memory."""
    table = None if sites is None else table_for(samples, sites)
    places = samples if table is None else table.slots
    memory = MemoryTables(size_of(places, budget), pickles=False)
    Store(memory, places, budget).divide(ranks)
    return (memory,) if table is None else (memory, table.memory)


def _close_sockets() -> None:
    """Closes connections and sockets in a forked child, which does not serve them."""
    while _sockets:
        _sockets.pop().close()


os.register_at_fork(after_in_child=_close_sockets)


def start_trial(
    dataset: MapDataset,
    limit_s: float,
    changing: Changing = UNCHANGED,
    indices: Sequence[Index] = (),
    sampler: Iterable[Index] = (),
    collate_fn: Callable[..., Batch] | None = None,
    alone: bool = False,
) -> Trial[TrialResult]:
    """Starts a trial of a dataset, or waits for the rank of this node that runs it. When the trial has ended, its
    ``memories`` are the node's. ``alone``: other ranks do not take part. For other arguments see ``find_plan``. Raises
    OSError if no process can be started."""

    def find() -> TrialResult:
        return find_plan(dataset, limit_s, changing, indices, sampler, None if is_shared else collate_fn)

    folder = os.environ.get("STOKER_RUN")
    is_shared = bool(folder) and resources.ranks() > 1 and not alone
    if folder and is_shared:
        with contextlib.suppress(StokerError, OSError):
            name, left_out = _name(dataset)
            meeting, is_first = private_sockets.meet(folder, name, CONNECT_S)
            _sockets.append(meeting)
            if is_first:
                return _Owner(find, 2 * limit_s, meeting, len(dataset), left_out)
            return _Member(find, 2 * limit_s, meeting, left_out)
    return Trial(find, 2 * limit_s)


def _name(dataset: object) -> tuple[str, set[str]]:
    """The socket's name, the same in all ranks of a run with the same dataset; and the attributes that may differ."""
    run = [os.environ.get(k) for k in ("MASTER_ADDR", "MASTER_PORT")]
    content, left_out = run_isolated(lambda: _content(dataset), DIGEST_S)  # runs the user's code
    return "ranks-" + hashlib.sha256(repr((run, os.getcwd(), content)).encode()).hexdigest()[:32], left_out


def _content(dataset: object, held: dict[str, object] | None = None) -> tuple[str, set[str]]:
    """Digest of everything that samples may read, and of ``held``, comparable between ranks; and the attributes that it
    excludes. Raises UsageError if something has no digest."""
    found = Inputs(dataset, held=held, ignored=OF_RANK, across_runs=True)
    if found.opaque:
        raise UsageError(next(iter(found.opaque.values())))
    environment = {"environ", "getenv"} if found.entries.pop("os.environ", None) else set()  # differs by rank
    return "".join(found.keys()), found.left_out | environment


def _globals(found: TrialResult, left_out: set[str]) -> str | None:
    """Digest of the global variables that the deterministic part reads. None: what it reads may differ by rank."""
    plan = found.plan or found.memo
    if plan is None:
        return ""
    may_differ = left_out and (plan.reads is None or plan.reads & left_out)
    return None if may_differ else _content(None, globals_now(plan.globals))[0]


class _Owner(Trial[TrialResult]):
    """The trial that others wait for. A thread sends them its result for as long as this process lives."""

    def __init__(
        self, find: Callable[[], TrialResult], limit_s: float, server: socket.socket, samples: int, left_out: set[str]
    ) -> None:
        self._samples = samples
        self._limit_s = limit_s
        self._left_out = left_out
        self._answered = threading.Event()
        try:
            super().__init__(find, limit_s)
        except OSError:
            server.close()
            raise
        threading.Thread(target=self._serve, args=(server,), name="stoker_node", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        return self._answered.wait(seconds)

    def _serve(self, server: socket.socket) -> None:
        answer = b""
        try:
            super().wait(self._limit_s + 1)
            answer = self._agree()
        except Exception:  # the others run their own trial
            self.memories = ()
        finally:
            self._answered.set()
        for connection in private_sockets.connections(server):
            with connection, contextlib.suppress(OSError):
                connection.settimeout(CONNECT_S)
                socket.send_fds(connection, [HEADER.pack(len(answer))], [memory.fd for memory in self.memories])
                connection.sendall(answer)

    def _agree(self) -> bytes:
        """Creates the memory. Returns for the others: the digest to compare, why the trial failed, and its result."""
        try:
            found = self.result()
        except StokerError as e:
            return plain.dumps(("", str(e), None))
        agreed = _globals(found, self._left_out)
        answer = plain.dumps((agreed, "", found))
        kept = found.plan or found.memo
        if agreed and kept is not None and not kept.pickled:
            sites = None if found.memo is None else found.memo.sites
            self.memories = new_memories(self._samples, sites, ram_budget(), resources.ranks())
        return answer


class _Member(Trial[TrialResult]):
    """Waits for another rank's trial. Runs its own if that rank has ended or reads other global variables."""

    def __init__(
        self, find: Callable[[], TrialResult], limit_s: float, connection: socket.socket, left_out: set[str]
    ) -> None:
        self._find = find
        self._limit_s = limit_s
        self._left_out = left_out
        self._connection: socket.socket | None = connection
        self._received = b""
        self._fds: list[int] = []
        self._others: tuple[str, TrialResult | None] | None = None  # why the other rank's trial failed, and its result

    def wait(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        if self._connection is not None:
            self._connection.settimeout(seconds)
            try:
                while self._receive(self._connection):
                    pass
            except (TimeoutError, BlockingIOError):
                return False
            except OSError:  # the other rank has ended
                pass
            self._connection.close()
            self._connection = None
            self._take()
        return super().wait(max(0.0, until - time.monotonic()))

    def _receive(self, connection: socket.socket) -> bool:
        """Receives more of the answer. Returns whether it is still incomplete."""
        data, fds, _, _ = socket.recv_fds(connection, 1 << 20, 4, socket.MSG_CMSG_CLOEXEC)
        self._received += data
        self._fds += fds
        there = len(self._received) - HEADER.size
        is_complete = there >= 0 and there == HEADER.unpack_from(self._received)[0]
        return bool(data) and not is_complete

    def result(self) -> TrialResult:
        why, found = self._others or ("", None)
        if why:
            raise UsageError(why)
        return found or super().result()

    def _take(self) -> None:
        """Uses the other rank's answer, or starts a trial."""
        memories = tuple(MemoryTables.of(fd, pickles=False) for fd in self._fds)
        with contextlib.suppress(Exception):  # empty: the other rank has no answer
            agreed, why, found = plain.loads(self._received[HEADER.size :])
            if agreed == "" or (agreed and agreed == _globals(found, self._left_out)):
                self._others, self.memories, self._reader = (why, found), memories, -1
                return
        super().__init__(self._find, self._limit_s)
