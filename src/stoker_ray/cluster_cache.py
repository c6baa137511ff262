"""The cache of one cluster node, and the protocol by which nodes ask each other for samples instead of making them.

::

    worker  --1. missing indices-->  actor of its node  --2. the same-->  actors of other nodes, one after the other
       ^         (inherited)           |         ^              (TCP)        |
       +---4. all answers--------------+         +---3. samples in its store-+

A worker adds received samples to its node's store, as far as there is room. Only the stored bytes are sent; no actor
decodes them into samples, and nothing is ever unpickled. The nodes of a run share a secret, a new one for each dataset,
so samples of a different dataset are never sent. Both ends prove that they know it, and each message is authenticated
(``peer_link``).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.core.private_sockets import connections
from stoker.staging.node_cache import new_memories
from stoker.staging.open_store import ram_budget
from stoker.staging.store.encode import CacheError
from stoker.staging.store.memory import MemoryTables
from stoker.staging.store.store import Gone, Store
from stoker.staging.store.tables import Samples
from stoker.workers.handover import Fd

from . import peer_link
from .peer_link import LENGTH, Link

BACKLOG = 256
CONNECT_S = 2.0  # limit for another node to prove that it knows the secret
MOST_STRANGERS = 64  # unauthenticated connections; one more ends the oldest
ANSWER_S = 5.0  # limit for another node's answer; a slower node is not asked again
MOST_ASKED = 8  # nodes asked for one batch: if none has the samples, this many round trips are wasted
MOST_BYTES = 64 << 20  # limit for one answer
PAYS = 0.5  # if asking takes more than this share of the time to make the samples, it is paused
LONGEST_PAUSE = 64  # for one batch, then two, four and so on, up to this many
Address = tuple[str, int]


def new_cache(samples: int, sites: int | None, asked: int, ranks: int) -> NodeCache | None:
    """Makes a cache on a node where each of several ranks has workers. None if there is no memory for one. ``samples``:
    how many the dataset has; 0 for no cache. ``sites``: number of call sites whose results are kept; None to keep
    samples. ``asked``: bytes that the user grants on each machine; 0 for half of the free memory."""
    budget = max(1, ram_budget() // ranks)
    with contextlib.suppress(OSError):
        memories = new_memories(samples, sites, min(asked or budget, budget), 1) if samples else ()
        return NodeCache(memories, samples) if memories else None
    return None


class Answer(NamedTuple):
    """Samples in the form in which a store keeps them."""

    head: list[tuple[int, str, list[int]]]  # for each sample its index, its type, and the sizes of its leaves in bytes
    data: list[memoryview]  # all leaves, one after the other

    def send(self, link: Link) -> None:
        """Sends the length of the head, the head as JSON, and the leaves."""
        head = json.dumps(self.head).encode()
        link.send(LENGTH.pack(len(head)), head, *self.data)

    @classmethod
    def receive(cls, link: Link) -> Answer:
        message = link.receive()
        (length,) = LENGTH.unpack(message[: LENGTH.size])
        end = LENGTH.size + length
        return cls(json.loads(bytes(message[LENGTH.size : end])), [message[end:]])

    def samples(self) -> Samples:
        out: Samples = {}
        at, data = 0, np.frombuffer(self.data[0], np.uint8)
        for i, type_spec, sizes in self.head:
            ends = [at + end for end in itertools.accumulate(sizes, initial=0)]
            out[i] = type_spec, [data[a:b] for a, b in itertools.pairwise(ends)]
            at = ends[-1]
        return out


class NodeCache:
    """The cache of a dataset with ``samples`` samples, in the actor. Pickling it for a worker sends the memory and the
    means to ask other nodes. ``memories``: of the store, and of the table of calls if calls are kept. Calls have
    different numbers on each node, so other nodes are not asked for them."""

    def __init__(self, memories: tuple[MemoryTables, ...], samples: int) -> None:
        self._memories = memories
        self._store = Store(memories[0], samples, 0) if len(memories) == 1 else None
        # Workers inherit the second socket, and send the actor's ends of new connections through it to the first.
        self._door, self._workers_door = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sockets = weakref.WeakSet([self._door, self._workers_door])
        self._strangers: deque[socket.socket] = deque()
        self._strangers_change = threading.Condition()
        self._peers: list[_Peer] = []
        self._first = itertools.count()  # which peer is asked first; rotates, so that all are asked equally often
        self._secret = b""

    def __reduce__(self) -> tuple[type[CacheOfWorker], tuple[tuple[MemoryTables, ...], Fd | None]]:
        return CacheOfWorker, (self._memories, None if self._store is None else Fd(self._workers_door.fileno()))

    def serve(self, host: str, secret: bytes) -> int:
        """Answers other nodes and this node's workers. Returns the port; 0 if other nodes cannot ask."""
        if self._store is None:
            return 0
        self._secret = secret
        threading.Thread(target=self._accept_workers, name="stoker_cache", daemon=True).start()
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            nodes = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        except OSError:  # others know this machine by an address that is not local to it
            return 0
        self._sockets.add(nodes)
        threading.Thread(target=self._accept_nodes, args=(nodes,), name="stoker_cache", daemon=True).start()
        return int(nodes.getsockname()[1])

    def set_peers(self, addresses: Sequence[Address]) -> None:
        known = {peer.address: peer for peer in self._peers}
        new = [address for address in addresses if address not in known]
        self._peers = [known.pop(a) for a in addresses if a in known] + [_Peer(a, self._secret) for a in new]
        for peer in known.values():
            peer.close()

    def close(self) -> None:
        for each in list(self._sockets):
            _end(each)
            each.close()
        self.set_peers(())

    def _accept_workers(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                knock, fds, _, _ = socket.recv_fds(self._door, 1, 1, socket.MSG_CMSG_CLOEXEC)
                if not knock:
                    return
                for fd in fds:  # empty if this process is out of descriptors
                    self._answer(socket.socket(fileno=fd), self._answer_worker)

    def _accept_nodes(self, server: socket.socket) -> None:
        for connection in connections(server):
            with self._strangers_change:
                while len(self._strangers) >= MOST_STRANGERS:
                    _end(self._strangers[0])
                    self._strangers_change.wait()
                self._strangers.append(connection)
            self._answer(connection, self._answer_node)

    def _answer(self, connection: socket.socket, answer: Callable[[socket.socket], None]) -> None:
        def run() -> None:
            with connection, contextlib.suppress(OSError, CacheError, ValueError, MemoryError):
                answer(connection)
            self._is_known(connection)

        self._sockets.add(connection)
        try:
            threading.Thread(target=run, name="stoker_cache", daemon=True).start()
        except RuntimeError:  # too many threads
            connection.close()
            self._is_known(connection)

    def _is_known(self, connection: socket.socket) -> None:
        """Removes a connection from those that are not authenticated yet."""
        with self._strangers_change, contextlib.suppress(ValueError):
            self._strangers.remove(connection)
            self._strangers_change.notify()

    def _answer_node(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = peer_link.accept(connection, self._secret, CONNECT_S)
        self._is_known(connection)
        while True:
            self._found(self._indices(link)).send(link)

    def _indices(self, link: Link) -> NDArray[np.int64]:
        """Receives a request for samples. Raises ValueError if it is invalid."""
        assert self._store is not None
        indices = np.frombuffer(link.receive(8 * self._store.samples), np.int64)
        if indices.min() < 0 or indices.max() >= self._store.samples:
            raise ValueError
        return indices

    def _found(self, indices: NDArray[np.int64]) -> Answer:
        """Returns those of the samples that are in the store, up to ``MOST_BYTES``."""
        out = Answer([], [])
        store, nbytes = self._store, 0
        assert store is not None
        for i, location in zip(indices, store.where(indices) if store.usable else (), strict=False):
            if location and nbytes < MOST_BYTES:
                try:
                    type_spec, leaves = store.stored(int(location))
                except Gone:
                    break
                out.head.append((int(i), type_spec, [x.nbytes for x in leaves]))
                out.data.extend(x.data for x in leaves)
                nbytes += sum(x.nbytes for x in leaves)
        return out

    def _answer_worker(self, connection: socket.socket) -> None:
        link = Link(connection)
        while True:
            self._ask_nodes(self._indices(link)).send(link)

    def _ask_nodes(self, indices: NDArray[np.int64]) -> Answer:
        """Returns those of these samples that other nodes have."""
        out = Answer([], [])
        peers = [peer for peer in self._peers if not peer.failed]
        first = next(self._first)
        for k in range(min(len(peers), MOST_ASKED)):
            found = peers[(first + k) % len(peers)].ask(indices)
            out.head.extend(found.head)
            out.data.extend(found.data)
            indices = indices[~np.isin(indices, [i for i, _, _ in found.head])]
            if not len(indices):
                break
        return out


class _Peer:
    """Another node. One request at a time."""

    def __init__(self, address: Address, secret: bytes) -> None:
        self.address = address
        self.failed = False
        self._secret = secret
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._link: Link | None = None  # over the connection

    def ask(self, indices: NDArray[np.int64]) -> Answer:
        with self._lock:
            try:
                if self._link is None:
                    self._connection = socket.create_connection(self.address, CONNECT_S)
                    self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self._link = peer_link.connect(self._connection, self._secret, CONNECT_S)
                    self._connection.settimeout(ANSWER_S)
                self._link.send(indices.data)
                return Answer.receive(self._link)
            except (OSError, ValueError):  # the node has gone, or works for a different dataset
                self.failed = True
                self._close()
                return Answer([], [])

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = self._link = None

    def close(self) -> None:
        self.failed, connection = True, self._connection
        if connection is not None:
            _end(connection)


def _end(connection: socket.socket) -> None:
    """Ends a connection, even while a thread waits for it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class CacheOfWorker:
    """The same cache in a worker. ``door``: socket to which the actor listens; None to not ask other nodes."""

    def __init__(self, memories: tuple[MemoryTables, ...], door: Fd | None) -> None:
        self.memories = memories
        self._door = door
        self._link: Link | None = None
        self._pause = self._left = 0  # batches

    def look_again(self) -> None:
        """Ends the pause when an epoch begins: other nodes may have new samples."""
        self._pause = self._left = 0

    def fetch(self, missing: Sequence[int], part_s: float) -> Samples:
        """Returns those of these samples that other nodes have. Pauses asking if it does not pay (``PAYS``).
        ``part_s``: seconds to make one sample; 0.0 if unknown."""
        if self._door is None or not missing:
            return {}
        if self._left:
            self._left -= 1
            return {}
        began = time.monotonic()
        try:
            if self._link is None:
                self._link = Link(_through(self._door))
            self._link.send(np.array(missing, np.int64).data)
            found = Answer.receive(self._link).samples()
        except (OSError, ValueError):  # the actor is about to end, or cannot read its store
            self._door = self._link = None
            return {}
        samples = {i: found[i] for i in missing if i in found}
        took = time.monotonic() - began
        if samples and (not part_s or took <= PAYS * len(samples) * part_s):
            self._pause = 0
        else:
            self._left = self._pause = min(LONGEST_PAUSE, 2 * self._pause or 1)
        return samples


def _through(door: Fd) -> socket.socket:
    """Makes a connection to the actor, by sending it the other end."""
    own, theirs = socket.socketpair()
    own.settimeout(MOST_ASKED * (CONNECT_S + ANSWER_S))
    with theirs, socket.socket(fileno=os.dup(door.fd)) as through:
        socket.send_fds(through, [b" "], [theirs.fileno()], socket.MSG_DONTWAIT)
    return own
