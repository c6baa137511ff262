"""The nodes that one loader uses: finds them, starts them, compares them with this machine, and gives them up.

A thread does everything that waits for Ray: joining the cluster takes seconds, and so does starting workers on a node.
Meanwhile, batches are made here. The life of a node::

    STARTING --workers started, same versions--> PROBING --one batch has the same bits--> READY <--answers-- DOUBTED
        \\______________________________\\___________________ \\_____________________________/  \\--too late--^
                                                             UNUSABLE
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import logging
import os
import socket
import statistics
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

from stoker.core.errors import UsageError
from stoker.sampling.order import Task
from stoker.transport.messages import Times
from stoker.transport.thread_slots import HeapWriter
from stoker.workers.protocol import WorkerSpec

from . import checks, cluster
from .node import Died, Packed, versions
from .shipment import Shipment, pickled_spec

logger = logging.getLogger("stoker.ray")
LOOK_S = 2.0  # between two listings of the nodes
START_S = 120.0  # limit for a node to start its workers
SLICE_S = 0.2  # between two checks of the session while waiting for a node
RECENT = 7  # calls whose durations are kept
MAX_DEATHS = 5  # actors of one node that may die
AHEAD = 2  # tasks in flight for each core of a node


class NodeState(enum.Enum):
    """The life of a node; see the module's docstring."""

    STARTING = enum.auto()
    PROBING = enum.auto()
    READY = enum.auto()
    DOUBTED = enum.auto()  # a call takes too long, so no new calls are made
    UNUSABLE = enum.auto()


@dataclass(eq=False)
class NodeRequest:
    """A call that asks a node for tasks."""

    node: RayNode
    actor: cluster.Actor  # the node's actor at that time
    round: int  # see ``Nodes.round``
    tasks: list[Task]
    sent: float  # time of the call, on the monotonic clock
    probe: bool = False  # its answer is compared instead of delivered
    repeated: bool = False  # its tasks were also given to others
    took_s: float = 0.0  # from the call to its answer


@dataclass(eq=False)
class RayNode:
    """A node as the trainer sees it."""

    info: cluster.NodeInfo  # Ray's information about it
    actor: cluster.Actor = None
    state: NodeState = NodeState.STARTING
    calls: list[NodeRequest] = field(default_factory=list)  # not answered yet
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))  # durations of its last calls
    asked: float = 0.0  # time of its last call
    batches: int = 0  # number of batches that it has made
    make_s: float = 0.0  # core seconds per batch, a moving average; 0.0 if unknown
    starting: bool = False  # a thread is starting its workers
    deaths: int = 0  # of its actors
    probed: bool = False  # it passed the comparison once, which holds for all datasets
    ports: list[int] = field(default_factory=list)  # see ``NodeWorkers.start``
    peers: list[tuple[str, list[int]]] = field(default_factory=list)  # the nodes that it was last told it may ask

    @property
    def took_s(self) -> float:
        """Seconds for a call: the median of recent ones, because any may be late by chance; 0.0 if unknown."""
        return statistics.median(self.recent_s) if self.recent_s else 0.0

    @property
    def open(self) -> int:
        """Number of tasks that it has."""
        return sum(len(call.tasks) for call in self.calls)

    def made(self, times: Times) -> None:
        """Records that the node has made a batch, and the times spent there."""
        took_s = sum(times[:2]) / 1e9
        self.make_s += (took_s - self.make_s) * (0.1 if self.batches else 1.0)
        self.batches += 1


class Wake:
    """Wakes a thread that polls ``fd``. ``set`` may be called from any thread, even after ``close``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def set(self) -> None:
        with self._lock:
            if self.fd >= 0:
                os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        with self._lock:
            fd, self.fd = self.fd, -1
        os.close(fd)


class Nodes:
    """The nodes that one loader uses. ``address``: of the cluster, see ``cluster.checked_address``. ``slot_bytes``:
    memory that batches from nodes may take here."""

    def __init__(self, address: str, slot_bytes: int) -> None:
        self.nodes: dict[str, RayNode] = {}  # by Ray's id
        self.lock = threading.RLock()  # must be held to read or change them
        self.key = ""  # identifies the dataset that they work on
        self.round = 0  # counts the epochs of all the loader's iterators; nodes work for the latest
        self.messages: deque[str] = deque()  # for the user, not shown yet
        # answered calls with their futures, also those of earlier iterators; Ray's threads append to it
        self.answers: deque[tuple[NodeRequest, Future[list[Packed | Died]]]] = deque()
        self.lost: deque[NodeRequest] = deque()  # calls of nodes that are no longer used
        self.wake = Wake()  # set when a node has started or answered
        self.slots = HeapWriter(slot_bytes)  # memory for batches from nodes
        self.store_bytes = 0  # size of this machine's object store
        self._beacon: socket.socket | None = None  # shows nodes when this process has ended
        self._address = cluster.checked_address(address)
        self._ray: ModuleType  # set by the thread, which makes all nodes
        self._shipment: Shipment | None = None
        self._shipped: object = None  # its reference in the object store
        self._owner = os.getpid()
        self._closed = False
        self._session = 0  # number of Ray sessions that have ended
        self._look_now = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, spec: WorkerSpec) -> None:
        """Prepares for a new iterator: packs what it needs. Nodes restart their workers if that has changed. Raises
        UsageError if Ray is not installed, or the dataset cannot be pickled."""
        if self._thread is None:
            cluster.check_installed()
        pickled = pickled_spec(replace(spec, base_seed=0, part_epochs=0, restart=True, shared=True, num_workers=1))
        key = hashlib.sha256(pickled.data).hexdigest()[:16]
        with self.lock:
            if key != self.key:
                self.key, self._shipment, self._shipped = key, Shipment.of(pickled), None
                for node in self.nodes.values():
                    if node.state is not NodeState.UNUSABLE:
                        node.state = NodeState.STARTING
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="stoker_nodes", daemon=True)
            self._thread.start()
        self._look_now.set()

    def next_round(self) -> int:
        """Begins a new round, which ends the previous one."""
        with self.lock:
            self.round += 1
            return self.round

    def with_state(self, *states: NodeState) -> list[RayNode]:
        return [node for node in list(self.nodes.values()) if node.state in states]

    def give_up(self, node: RayNode, reason: str) -> None:
        with self.lock:
            if node.state is NodeState.UNUSABLE:
                return
            node.state = NodeState.UNUSABLE
            self.lost += node.calls
            others = len(self.with_state(NodeState.READY))
            rest = f"{others} other nodes and this machine continue" if others else "Only this machine loads batches"
            self.messages.append(f"Node {node.info.name} makes no batches: {reason}. {rest}")
        self.wake.set()
        cluster.kill_actor(self._ray, node.actor)

    def restart(self, node: RayNode, reason: str) -> None:
        """Starts a new actor on a node whose actor died, up to ``MAX_DEATHS`` times: the node may still be there."""
        node.deaths += 1
        if node.deaths > MAX_DEATHS:
            self.give_up(node, f"{reason}, for the {node.deaths}th time")
            return
        with self.lock:
            if node.state is NodeState.UNUSABLE:
                return
            actor, node.actor = node.actor, None
            node.state = NodeState.STARTING
            self.lost += node.calls
            node.calls = []
            self.messages.append(f"Node {node.info.name}: {reason}. It is started again; no batch changes")
        cluster.kill_actor(self._ray, actor)
        self._look_now.set()

    def leave_session(self) -> None:
        """Drops all nodes when the Ray session ends. If there is another session, nodes are looked up in that."""
        with self.lock:
            self._session += 1
            self._shipped = None
            for node in self.nodes.values():
                node.state = NodeState.UNUSABLE
                self.lost += node.calls
            self.nodes.clear()
        self.wake.set()

    def close(self) -> None:
        """Ends the workers on all nodes. Leaves the connection open, because it may be the script's."""
        with self.lock:
            if self._closed or os.getpid() != self._owner:
                return
            self._closed = True
            actors = [node.actor for node in self.nodes.values() if node.actor is not None]
            self.nodes.clear()
        self._look_now.set()
        for actor in actors:
            cluster.kill_actor(self._ray, actor)
        if self._beacon is not None:
            self._beacon.close()
        self.wake.close()

    # -- the thread

    def _run(self) -> None:
        try:
            self._ray = cluster.connect(self._address, self)
            self.store_bytes = cluster.own_store(self._ray)
            self._beacon = cluster.beacon(self._ray)
        except Exception as e:
            self.messages.append(f"No workers on other nodes: {e}. Only this machine loads batches")
            self.wake.set()
            return
        told = False
        while not self._closed:
            self._look_now.wait(LOOK_S)
            self._look_now.clear()
            if self._closed:
                return
            if not self._ray.is_initialized():  # any call would make Ray connect again
                if self.nodes:
                    self.messages.append("The script has shut Ray down. Only this machine loads batches")
                    self.leave_session()
                continue
            session = self._session
            try:
                with cluster.using_ray():
                    found = cluster.other_nodes(self._ray)
            except Exception as e:
                logger.info("nodes cannot be listed: %s", e)
                continue
            if session != self._session:
                continue
            if not found and not told:
                self.messages.append(
                    "The cluster has no node that could make batches: this machine is its only one, or the others have "
                    "GPUs. Only this machine loads batches"
                )
            told = True
            self._compare(found)
            self._introduce()

    def _compare(self, found: dict[str, cluster.NodeInfo]) -> None:
        """Starts new nodes, and gives up those that have left the cluster."""
        with self.lock:
            gone = [node for id_, node in self.nodes.items() if id_ not in found]
            for info in found.values():
                if info.id not in self.nodes and not self._closed:
                    self.nodes[info.id] = RayNode(info)
            starting = [node for node in self.with_state(NodeState.STARTING) if not node.starting]
            for node in starting:
                node.starting = True
        for node in gone:
            self.give_up(node, "it has left the cluster")
            with self.lock:
                self.nodes.pop(node.info.id, None)
        for node in starting:
            threading.Thread(target=self._start, args=(node,), name="stoker_start", daemon=True).start()

    def _introduce(self) -> None:
        """Tells nodes which others they may ask for samples: those that make the same bits as this machine."""
        with self.lock:
            ready = self.with_state(NodeState.READY)
            for node in ready:
                peers = [(other.info.host, other.ports) for other in ready if other is not node and any(other.ports)]
                if any(node.ports) and peers != node.peers:
                    node.peers = peers
                    with contextlib.suppress(Exception):  # the actor may just have ended
                        node.actor.set_peers.remote(self.key, peers)

    def _start(self, node: RayNode) -> None:
        try:
            self._start_workers(node)
        finally:
            node.starting = False

    def _start_workers(self, node: RayNode) -> None:
        """Compares versions with a node, and starts its workers."""
        ray, session = self._ray, self._session
        try:
            if node.actor is None:
                names = checks.imported_packages()
                here = versions(names)
                trainer = None if self._beacon is None else self._beacon.getsockname()[:2]
                with cluster.using_ray():
                    node.actor = cluster.start_actor(ray, node.info, AHEAD * node.info.cores + 2)
                    ref = node.actor.facts.remote(names, trainer)
                facts = self._wait_for(ref, session)
                differing = checks.difference(here, facts)
                if differing:
                    reason = f"it has {differing}. Other versions may make other bits: install the same there"
                    self.give_up(node, reason)
                    return
            with self.lock:
                if session != self._session:
                    return  # an actor of a previous session must not be called
                key, shipment = self.key, self._shipment
                with cluster.using_ray():
                    if self._shipped is None:
                        self._shipped = ray.put(shipment)
                    ref = node.actor.start.remote(key, self._shipped, node.info.cores, node.info.host)
            node.ports, node.peers = self._wait_for(ref, session), []
        except Exception as e:
            if not self._closed and session == self._session:
                self.give_up(
                    node, f"it cannot start workers ({type(e).__name__}: {str(e).strip().rpartition(chr(10))[2]})"
                )
            return
        with self.lock:
            if key == self.key and node.state is NodeState.STARTING:
                node.state = NodeState.READY if node.probed else NodeState.PROBING
        self.wake.set()

    def _wait_for(self, ref: object, session: int) -> Any:
        """Waits for an actor's answer, and checks now and then that the session still exists."""
        deadline = time.monotonic() + START_S
        while True:
            with cluster.using_ray():
                if session != self._session:
                    raise cluster.ClusterError("the Ray session has ended")
                if self._ray.wait([ref], timeout=SLICE_S)[0]:
                    return self._ray.get(ref)
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer in {START_S:.0f} s")


def check_dataset(spec: WorkerSpec) -> None:
    """Raises UsageError, which says why, if other nodes cannot help with this dataset."""
    if not spec.shared:
        raise UsageError("the parts of an iterable dataset belong to workers, and workers on other nodes share tasks")
    if spec.tell > 0:
        with contextlib.suppress(AttributeError):
            spec.dataset.state_dict  # noqa: B018
            raise UsageError("the dataset has a state_dict(), which belongs to one worker")
    if spec.timed:
        raise UsageError("sample_timeout= kills the worker that hangs, and it can only be done on this machine")
