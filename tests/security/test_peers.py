"""Caches of nodes ask each other over TCP: who is no node of the run learns nothing, changes nothing, and ends nothing."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from stoker.core.compare import equal_bits
from stoker.staging.store.decode import layout
from stoker.staging.store.encode import take
from stoker.staging.store.store import Store
from stoker_ray import cluster_cache, peer_link
from stoker_ray.cluster_cache import CacheOfWorker, NodeCache, new_cache

from .users import LIMIT_S

N = 40
SECRET = b"s" * 32


@pytest.fixture
def node() -> Iterator[Callable[[], NodeCache]]:
    made: list[NodeCache] = []

    def make() -> NodeCache:
        cache = new_cache(N, None, 1 << 20, 1)
        assert cache is not None
        made.append(cache)
        return cache

    yield make
    for cache in made:
        cache.close()


def worker_of(cache: NodeCache) -> tuple[CacheOfWorker, Store]:
    made, arguments = cache.__reduce__()
    worker = made(*arguments)
    return worker, Store(worker.memories[0], N, 0)


def sample(i: int) -> tuple[torch.Tensor, int]:
    return torch.arange(6.0) * i, i


def filled(cache: NodeCache) -> int:
    """Gives a node all samples. Returns its port."""
    port = cache.serve("127.0.0.1", SECRET)
    worker_of(cache)[1].admit({i: take(sample(i)) for i in range(N)})
    return port


class Between:
    """What answers at a node's address, and passes on what it likes. It remembers all it has heard."""

    def __init__(
        self, port: int, change: Callable[[bytes, int, bool], bytes] = lambda data, at, to_client: data
    ) -> None:
        self.heard = b""
        self._change, self._to = change, port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = self._server.getsockname()[:2]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        client, _ = self._server.accept()
        node = socket.create_connection(("127.0.0.1", self._to))
        pairs = (client, node, False), (node, client, True)
        threads = [threading.Thread(target=self._pass, args=pair, daemon=True) for pair in pairs]
        for t in threads:
            t.start()

    def _pass(self, source: socket.socket, target: socket.socket, to_client: bool) -> None:
        at = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.heard += data
                target.sendall(self._change(data, at, to_client))
                at += len(data)
            target.shutdown(socket.SHUT_WR)


def asks(node: Callable[[], NodeCache], address: tuple[str, int]) -> tuple[NodeCache, CacheOfWorker]:
    """A node that asks what is at this address, and a worker of it."""
    cache = node()
    cache.serve("127.0.0.1", SECRET)
    cache.set_peers([address])
    return cache, worker_of(cache)[0]


def test_what_is_in_between_hears_no_secret(node: Callable[[], NodeCache]) -> None:
    between = Between(filled(node()))
    _, worker = asks(node, between.address)
    found = worker.fetch([3, 4], 0.1)
    assert all(equal_bits(layout(spec, False).put(leaves), sample(i)) for i, (spec, leaves) in found.items())
    assert sorted(found) == [3, 4]
    assert SECRET not in between.heard
    assert len(between.heard) > 2 * peer_link.NONCE_BYTES + 2 * peer_link.PROOF_BYTES


# Of the proof, the length, the head, the samples, the tag.
@pytest.mark.parametrize("at", [0, 40, 64, 71, 90, 190, 230])
def test_what_is_changed_on_the_way_is_dropped(
    node: Callable[[], NodeCache], at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_cache, "ANSWER_S", 0.5)

    def flip(data: bytes, begin: int, to_client: bool) -> bytes:
        if to_client and begin <= at < begin + len(data):
            k = at - begin
            return data[:k] + bytes([data[k] ^ 1]) + data[k + 1 :]
        return data

    between = Between(filled(node()), flip)
    cache, worker = asks(node, between.address)
    assert worker.fetch([3, 4], 0.1) == {}
    assert cache._peers[0].failed


@pytest.mark.parametrize("how", ["repeated", "left out", "sent back"])
def test_a_message_that_does_not_come_in_its_turn_ends_the_connection(how: str) -> None:
    near, far = socket.socketpair()
    with near, far, ThreadPoolExecutor(1) as pool:
        made = pool.submit(peer_link.connect, near, SECRET, 5.0)
        server = peer_link.accept(far, SECRET, 5.0)
        client = made.result(LIMIT_S)
        client.send(b"one")
        message = far.recv(1 << 16, socket.MSG_PEEK)
        assert bytes(server.receive()) == b"one"
        if how == "repeated":
            near.sendall(message)
        elif how == "left out":
            client.send(b"two")
            far.recv(1 << 16)
            client.send(b"three")
        else:
            far.sendall(message)
        with pytest.raises(ValueError):  # noqa: PT011
            (client if how == "sent back" else server).receive()


class Program:
    """A program that has the port of a node that has ended. It says ``lines``, one after each thing that it hears."""

    def __init__(self, *lines: bytes) -> None:
        self.heard: list[bytes] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = self._server.getsockname()[:2]
        threading.Thread(target=self._run, args=(lines,), daemon=True).start()

    def _run(self, lines: tuple[bytes, ...]) -> None:
        connection, _ = self._server.accept()
        with connection, contextlib.suppress(OSError):
            for line in lines:
                self.heard.append(connection.recv(1 << 16))
                connection.sendall(line)
            self.heard.append(connection.recv(1 << 16))


@pytest.mark.parametrize("lines", [(bytes(64),), (b"x" * 5000, b"y" * 5000), (b"HTTP/1.1 400 Bad Request\r\n\r\n",)])
def test_a_program_that_is_no_node_is_asked_for_nothing(
    node: Callable[[], NodeCache], lines: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_cache, "CONNECT_S", 0.3)
    program = Program(*lines)
    cache, worker = asks(node, program.address)
    assert worker.fetch([3], 0.1) == {}
    assert cache._peers[0].failed
    assert len(program.heard[0]) == peer_link.NONCE_BYTES
    assert not b"".join(program.heard[1:])


def test_who_sends_the_proof_back_is_no_node(node: Callable[[], NodeCache]) -> None:
    """A node's own answer proves nothing to it."""
    server, client = node(), node()
    port = server.serve("127.0.0.1", SECRET)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(LIMIT_S)
        connection.sendall(bytes(peer_link.NONCE_BYTES))
        nonce_and_proof = connection.recv(1 << 16)
        connection.sendall(nonce_and_proof[peer_link.NONCE_BYTES :])
        assert connection.recv(1) == b""
    program = Program(nonce_and_proof)  # for another random number
    client.serve("127.0.0.1", SECRET)
    client.set_peers([program.address])
    assert worker_of(client)[0].fetch([3], 0.1) == {}


def test_who_knows_no_secret_is_told_nothing(node: Callable[[], NodeCache]) -> None:
    port = filled(node())
    for secret in (b"", b"t" * 32, SECRET[:-1]):
        with socket.create_connection(("127.0.0.1", port)) as connection, pytest.raises(ValueError):  # noqa: PT011
            peer_link.connect(connection, secret, 5.0)


def test_a_huge_message_takes_no_memory() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(peer_link.LENGTH.pack(1 << 62))
        with pytest.raises(ValueError):  # noqa: PT011
            peer_link.Link(ours).receive()


def test_samples_that_were_not_asked_for_are_not_taken(node: Callable[[], NodeCache]) -> None:
    """Such as those of other numbers than there are."""
    cache, worker = asks(node, ("127.0.0.1", 1))
    spec, leaves = take(sample(7))
    head = [(i, spec, [x.nbytes for x in leaves]) for i in (3, 7, 10**6)]
    answer = cluster_cache.Answer(head, [np.concatenate(leaves).data] * 3)  # type: ignore[list-item]
    cache._ask_nodes = lambda indices: answer  # type: ignore[method-assign]
    assert sorted(worker.fetch([7, 8], 0.1)) == [7]


FLOOD = """
import resource, socket, sys, threading, time
from stoker_ray import cluster_cache
from tests.security.test_peers import N, SECRET, asks, filled, new_cache, sample

resource.setrlimit(resource.RLIMIT_NOFILE, (160, 160))
cluster_cache.CONNECT_S = 1.0
server, client = (new_cache(N, None, 1 << 20, 1) for _ in range(2))
port = filled(server)
print(port, flush=True)
sys.stdin.readline()  # they have connected
until = time.monotonic() + 30
threads = threading.active_count()
found = {}
while not found and time.monotonic() < until:
    client = new_cache(N, None, 1 << 20, 1)
    found = asks(lambda: client, ("127.0.0.1", port))[1].fetch([3, 4], 0.1)
    client.close()
print(threads <= cluster_cache.MOST_STRANGERS + 8, sorted(found))
"""


@pytest.mark.slow
def test_idle_connections_do_not_end_the_server() -> None:
    """More of them than the node may have descriptors."""
    line = [sys.executable, "-W", "ignore", "-c", FLOOD]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < 1000:
        pytest.skip(f"this process may have {most} descriptors only")
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        idle = []
        try:
            for _ in range(300):
                idle.append(socket.socket())
                idle[-1].setblocking(False)
                idle[-1].connect_ex(("127.0.0.1", port))
            out, _ = process.communicate("\n", timeout=LIMIT_S)
        finally:
            for connection in idle:
                connection.close()
    assert out.split(maxsplit=1) == ["True", "[3, 4]\n"]


def test_who_says_nothing_or_little_is_left(node: Callable[[], NodeCache], monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then is no reason to wait on."""
    monkeypatch.setattr(cluster_cache, "CONNECT_S", 0.3)
    port = node().serve("127.0.0.1", SECRET)
    for drip in (b"", b"x"):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.settimeout(0.05)
            until = time.monotonic() + LIMIT_S
            while time.monotonic() < until:
                try:
                    connection.sendall(drip)
                    if connection.recv(1) == b"":
                        break
                except TimeoutError:
                    continue
                except OSError:  # it has closed the connection before it read all
                    break
            else:
                raise AssertionError("it is still waited for")


def own_sockets() -> set[str]:
    fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    links = [os.readlink(fd) for fd in fds if os.path.exists(fd)]
    return {link[8:-1] for link in links if link.startswith("socket:")}


def test_the_sockets_of_workers_have_no_name(node: Callable[[], NodeCache]) -> None:
    before = own_sockets()  # of other tests, which may end at any time
    _, worker = asks(node, ("127.0.0.1", 1))
    worker.fetch([1], 0.1)
    inodes = own_sockets() - before
    rows = [line.split() for line in open("/proc/net/unix")][1:]
    own = [row for row in rows if row[6] in inodes]
    assert len(own) >= 4
    assert not [row for row in own if len(row) > 7 and "stoker" in row[7]]
