"""The cache of one node of a cluster, and how nodes ask each other for samples instead of making them again.

::

    worker  --1. what is missing-->  actor of its node  --2. the same-->  actors of other nodes, one after the other
       ^            (unix)             |         ^              (TCP)        |
       +---4. all that came------------+         +---3. what is in its store-+

A worker enters what came into its node's store, as far as there is room. Only bytes travel, as they lie in a store; no
actor makes samples of them. Nodes of one run have a secret, and a new one for each dataset, so that no sample of
another dataset is ever sent.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import json
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .node_cache import new_memories, peer_uid
from .open_store import ram_budget
from .store.encode import CacheError
from .store.memory import Memory
from .store.store import Gone, Store
from .store.tables import Samples

LENGTH = struct.Struct("<q")
BACKLOG = 256
CONNECT_S = 2.0
ANSWER_S = 5.0  # that another node may take; one that takes longer is asked no more
MOST_ASKED = 8  # nodes, for one batch: where nobody has them, asking costs as many round trips
MOST_BYTES = 64 << 20  # of one answer
PAYS = 0.5  # of the time to make samples: asking that takes longer is paused,
LONGEST_PAUSE = 64  # for one batch, two, four, and so on, up to so many
Address = tuple[str, int]


def new_cache(samples: int, sites: int | None, asked: int, ranks: int) -> NodeCache | None:
    """A cache on a node where each of several ranks has workers. None where there is no memory for one.

    Args:
        samples: of the dataset; 0: no cache is wanted.
        sites: calls of the code that are kept; None: samples are.
        asked: bytes that the user grants on each machine; 0: half of what is free there.
        ranks: how many.
    """
    budget = max(1, ram_budget() // ranks)
    with contextlib.suppress(OSError):
        memories = new_memories(samples, sites, min(asked or budget, budget), 1) if samples else ()
        return NodeCache(memories, samples) if memories else None
    return None


class Answer(NamedTuple):
    """Samples as they lie in a store.

    Attributes:
        head: of each its index, its type, and the sizes of its leaves.
        data: all leaves, one after the other.
    """

    head: list[tuple[int, str, list[int]]]
    data: list[memoryview]

    def send(self, connection: socket.socket) -> None:
        """Sends it: the length of the head, the head as JSON, the leaves."""
        head = json.dumps(self.head).encode()
        connection.sendall(b"".join([LENGTH.pack(len(head)), head, *self.data]))

    @classmethod
    def receive(cls, connection: socket.socket) -> Answer:
        """Receives one."""
        (length,) = LENGTH.unpack(_receive(connection, LENGTH.size))
        head = json.loads(bytes(_receive(connection, length)))
        return cls(head, [_receive(connection, sum(sum(sizes) for _, _, sizes in head))])

    def samples(self) -> Samples:
        """By index: what a store takes."""
        out: Samples = {}
        at, data = 0, np.frombuffer(self.data[0], np.uint8)
        for i, type_spec, sizes in self.head:
            ends = [at + end for end in itertools.accumulate(sizes, initial=0)]
            out[i] = type_spec, [data[a:b] for a, b in itertools.pairwise(ends)]
            at = ends[-1]
        return out


def _receive(connection: socket.socket, n: int) -> memoryview:
    data = memoryview(bytearray(n))
    at = 0
    while at < n:
        got = connection.recv_into(data[at:])
        if not got:
            raise ConnectionResetError
        at += got
    return data


def _send_indices(connection: socket.socket, indices: NDArray[np.int64]) -> None:
    connection.sendall(LENGTH.pack(len(indices)) + indices.tobytes())


class NodeCache:
    """The cache, in the actor. Pickled for its workers, it is the memory and how they ask.

    Args:
        memories: of the store and of the table of calls, if calls are kept: these have other numbers on each node, and
            are not asked for.
        samples: of the dataset.
    """

    def __init__(self, memories: tuple[Memory, ...], samples: int) -> None:
        self._memories = memories
        self._store = Store(memories[0], samples, 0) if len(memories) == 1 else None
        self._name = "" if self._store is None else f"\0stoker-peers-{secrets.token_hex(16)}"
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._peers: list[_Peer] = []
        self._first = itertools.count()  # who is asked first, so that all are asked as often
        self._secret = b""

    def __reduce__(self) -> tuple[type[CacheOfWorker], tuple[tuple[Memory, ...], str]]:
        return CacheOfWorker, (self._memories, self._name)

    def serve(self, host: str, secret: bytes) -> int:
        """Answers other nodes, and workers of this one. Returns the port; 0: there is nothing to ask for."""
        if self._store is None:
            return 0
        self._secret = secret
        workers = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        workers.bind(self._name)
        workers.listen(BACKLOG)
        self._start(workers, self._answer_worker)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            nodes = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        except OSError:  # an address that others know this machine by, and it does not
            return 0
        self._start(nodes, self._answer_node)
        return int(nodes.getsockname()[1])

    def _start(self, server: socket.socket, answer: Callable[[socket.socket], None]) -> None:
        self._sockets.add(server)
        threading.Thread(target=self._accept, args=(server, answer), name="stoker_cache", daemon=True).start()

    def set_peers(self, addresses: Sequence[Address]) -> None:
        """The other nodes that may be asked."""
        known = {peer.address: peer for peer in self._peers}
        new = [address for address in addresses if address not in known]
        self._peers = [known.pop(a) for a in addresses if a in known] + [_Peer(a, self._secret) for a in new]
        for peer in known.values():
            peer.close()

    def close(self) -> None:
        """Answers nobody any more."""
        for each in list(self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self.set_peers(())

    def _accept(self, server: socket.socket, answer: Callable[[socket.socket], None]) -> None:
        def run(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError, CacheError, ValueError, MemoryError):
                answer(connection)

        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = server.accept()
                self._sockets.add(connection)
                threading.Thread(target=run, args=(connection,), name="stoker_cache", daemon=True).start()

    def _answer_node(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(CONNECT_S)
        if not hmac.compare_digest(bytes(_receive(connection, len(self._secret))), self._secret):
            return
        connection.settimeout(None)
        while True:
            self._found(self._indices(connection)).send(connection)

    def _indices(self, connection: socket.socket) -> NDArray[np.int64]:
        """A request. Raises ValueError: it is none."""
        assert self._store is not None
        (n,) = LENGTH.unpack(_receive(connection, LENGTH.size))
        if not 0 < n <= self._store.samples:
            raise ValueError
        indices = np.frombuffer(_receive(connection, 8 * n), np.int64)
        if indices.min() < 0 or indices.max() >= self._store.samples:
            raise ValueError
        return indices

    def _found(self, indices: NDArray[np.int64]) -> Answer:
        """Those samples that are in the store."""
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
        while peer_uid(connection) == os.getuid():
            self._ask_nodes(self._indices(connection)).send(connection)

    def _ask_nodes(self, indices: NDArray[np.int64]) -> Answer:
        """What other nodes have of these samples."""
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

    def ask(self, indices: NDArray[np.int64]) -> Answer:
        """What it has of these samples."""
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = socket.create_connection(self.address, CONNECT_S)
                    self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self._connection.settimeout(ANSWER_S)
                    self._connection.sendall(self._secret)
                _send_indices(self._connection, indices)
                return Answer.receive(self._connection)
            except (OSError, ValueError):  # it has gone, or works for another dataset
                self.failed = True
                self._close()
                return Answer([], [])

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        """Ends the connection, also under a thread that waits for an answer."""
        self.failed, connection = True, self._connection
        with contextlib.suppress(OSError):
            if connection is not None:
                connection.shutdown(socket.SHUT_RDWR)


class CacheOfWorker:
    """The same cache in a worker.

    Args:
        memories: of the store, and of the table of calls.
        name: of the actor's socket; "": other nodes are not asked.
    """

    def __init__(self, memories: tuple[Memory, ...], name: str) -> None:
        self.memories = memories
        self._name = name
        self._connection: socket.socket | None = None
        self._pause = self._left = 0  # batches

    def look_again(self) -> None:
        """An epoch begins: other nodes may have what they did not have before."""
        self._pause = self._left = 0

    def fetch(self, missing: Sequence[int], part_s: float) -> Samples:
        """What other nodes have of these samples. They are not asked while that takes longer than to make them.

        Args:
            missing: indices.
            part_s: what it takes to make one; 0.0: not known.
        """
        if not self._name or not missing:
            return {}
        if self._left:
            self._left -= 1
            return {}
        began = time.monotonic()
        try:
            if self._connection is None:
                self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._connection.settimeout(MOST_ASKED * (CONNECT_S + ANSWER_S))
                self._connection.connect(self._name)
            _send_indices(self._connection, np.array(missing, np.int64))
            samples = Answer.receive(self._connection).samples()
        except (OSError, ValueError):  # the actor is about to end, or cannot read what is stored
            self._name = ""
            return {}
        took = time.monotonic() - began
        if samples and (not part_s or took <= PAYS * len(samples) * part_s):
            self._pause = 0
        else:
            self._left = self._pause = min(LONGEST_PAUSE, 2 * self._pause or 1)
        return samples
