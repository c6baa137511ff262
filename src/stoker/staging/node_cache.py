"""One trial and one cache in memory for all ranks of a node that have the same dataset.

1. Each rank makes a name from the run and a digest of its dataset, for a socket in the abstract namespace (unix(7)).
2. The first rank binds it (``_Owner``). It makes the trial, and then the memory.
3. Every other rank connects (``_Member``) and waits. It receives what the trial found, and the memory's descriptor
   (SCM_RIGHTS).
4. A rank whose owner has ended makes its own trial.

Nothing has a name in a file system. The kernel removes the socket however its owner ends; ranks that have the memory
mapped keep it, and the next rank makes a new one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from ..core import resources
from ..core.errors import StokerError
from ..core.types import Index
from .digest import digest
from .isolate import Trial, run_isolated
from .memoize import table_for
from .open_store import ram_budget
from .plan import globals_now
from .store.memory import Memory
from .store.store import Store, size_of
from .trial import Found, find_plan

DIGEST_S = 1.5  # for the digest of a dataset; a cache whose digest takes longer is not shared
CONNECT_S = 1.0
BACKLOG = 128  # ranks that wait while the trial runs
HEADER = struct.Struct("<q")  # bytes that follow

_sockets: list[socket.socket] = []


def new_memories(samples: int, sites: int | None, budget: int, ranks: int) -> tuple[Memory, ...]:
    """Memory of an empty cache: of its store and, where ``sites`` calls of the code are kept, of the table of calls.
    Raises OSError: there is no such memory here."""
    table = None if sites is None else table_for(samples, sites)
    places = samples if table is None else table.slots
    memory = Memory(size_of(places, budget))
    Store(memory, places, budget).divide(ranks)
    return (memory,) if table is None else (memory, table.memory)


def _close_sockets() -> None:
    """A forked child must not keep a connection, or the name of a socket that it does not answer."""
    while _sockets:
        _sockets.pop().close()


os.register_at_fork(after_in_child=_close_sockets)


def start_trial(
    dataset: Any,
    limit_s: float,
    changing: Collection[str] = (),
    indices: Sequence[Index] = (),
    sampler: Iterable[Index] = (),
) -> Trial:
    """Begins to look for the deterministic part of a dataset, or asks the rank of this node that does. The trial's
    ``memories`` are the node's, once it has ended. The others: see ``find_plan``. Raises OSError: no process can
    be started."""

    def find() -> Found:
        return find_plan(dataset, limit_s, changing, indices, sampler)

    if resources.ranks() > 1:
        with contextlib.suppress(StokerError, OSError):
            name, left_out = _name(dataset)
            meeting = _meet(name)
            if isinstance(meeting, _Server):
                return _Owner(find, 2 * limit_s, meeting, len(dataset), left_out)
            if meeting is not None:
                return _Member(find, 2 * limit_s, meeting, left_out)
    return Trial(find, 2 * limit_s)


def _name(dataset: Any) -> tuple[bytes, set[str]]:
    """The socket's name, the same in all ranks of a run that have the same dataset; and which attributes may differ."""
    run = [os.environ.get(k) for k in ("STOKER_RUN", "MASTER_ADDR", "MASTER_PORT")]
    content, left_out = run_isolated(lambda: digest((len(dataset), dataset)), DIGEST_S)  # it runs the user's code
    key = repr((run, os.getuid(), os.getcwd(), content))
    return b"\0stoker-node-" + hashlib.sha256(key.encode()).hexdigest()[:32].encode(), left_out


def _globals(found: Found, left_out: set[str]) -> str | None:
    """A digest of the global variables that the deterministic part reads. None: what it reads may differ by rank."""
    plan = found.plan or found.memo
    if plan is None:
        return ""
    may_differ = left_out and (plan.reads is None or plan.reads & left_out)
    return None if may_differ else digest(globals_now(plan.globals))[0]


class _Server(socket.socket):
    """The socket of the first rank."""


def _meet(name: bytes) -> socket.socket | None:
    """The server, in the first rank; a connection to it in the others. None: it does not answer."""
    until = time.monotonic() + CONNECT_S
    while time.monotonic() < until:
        server = _Server(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            server.bind(name)
            server.listen(BACKLOG)
            _sockets.append(server)
            return server
        except OSError:  # another rank has it
            server.close()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(CONNECT_S)
        try:
            connection.connect(name)
            if peer_uid(connection) != os.getuid():  # abstract sockets have no permissions of their own
                break
            _sockets.append(connection)
            return connection
        except OSError:  # not listening yet, or gone since
            connection.close()
            time.sleep(0.001)
    return None


def peer_uid(connection: socket.socket) -> int:
    """The user at the other end of a Unix socket."""
    return int(struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1])


class _Owner(Trial):
    """The trial that others wait for. A thread sends them what it found, as long as this process lives."""

    def __init__(
        self, find: Callable[[], Found], limit_s: float, server: socket.socket, samples: int, left_out: set[str]
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
        agreed = None
        try:
            super().wait(self._limit_s + 1)
            agreed = self._agree()
        except Exception:  # the others look for themselves
            self.memories = ()
        finally:
            self._answered.set()
        answer = pickle.dumps((agreed, b"".join(self._parts)))
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(CONNECT_S)
                if peer_uid(connection) == os.getuid():
                    socket.send_fds(connection, [HEADER.pack(len(answer))], [memory.fd for memory in self.memories])
                    connection.sendall(answer)

    def _agree(self) -> str | None:
        """Makes the memory. Returns the digest that the others compare with theirs."""
        try:
            found = self.result()
        except StokerError:
            return ""
        agreed = _globals(found, self._left_out)
        if agreed:
            sites = None if found.memo is None else found.memo.sites
            self.memories = new_memories(self._samples, sites, ram_budget(), resources.ranks())
        return agreed


class _Member(Trial):
    """Waits for another rank's trial. Makes its own where that rank has ended, or reads other global variables."""

    def __init__(
        self, find: Callable[[], Found], limit_s: float, connection: socket.socket, left_out: set[str]
    ) -> None:
        self._find = find
        self._limit_s = limit_s
        self._left_out = left_out
        self._connection: socket.socket | None = connection
        self._received = b""
        self._fds: list[int] = []

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
        """Receives more of the answer. Returns whether it is incomplete."""
        data, fds, _, _ = socket.recv_fds(connection, 1 << 20, 4, socket.MSG_CMSG_CLOEXEC)
        self._received += data
        self._fds += fds
        return bool(data) and not self._complete()

    def _complete(self) -> bool:
        there = len(self._received) - HEADER.size
        return there >= 0 and there == HEADER.unpack_from(self._received)[0]

    def _take(self) -> None:
        """Uses the other rank's answer, or begins a trial."""
        memories = tuple(map(Memory.of, self._fds))
        if self._complete():
            agreed, data = pickle.loads(self._received[HEADER.size :])
            self._parts, self._reader = [data], -1
            with contextlib.suppress(Exception):
                if agreed == "" or (agreed and agreed == _globals(self.result(), self._left_out)):
                    self.memories = memories
                    return
        super().__init__(self._find, self._limit_s)
