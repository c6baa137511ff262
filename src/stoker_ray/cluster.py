"""Connects to a Ray cluster, and finds the nodes that make batches.

Joins a cluster but never starts one: the trainer must be a node of it (``ray start --address=... `` on its machine).
If the script itself uses Ray, its session is used, and never shut down here. If it calls ``ray.init`` after a session
was begun here, that session ends, and nodes are looked up in the script's.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import logging
import os
import socket
import threading
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple, Protocol, TypeAlias

from stoker.core.errors import StokerError, UsageError

from .shipment import EXTRA

logger = logging.getLogger("stoker.ray")
Actor: TypeAlias = Any  # Ray's actor handle, whose methods are looked up by name
CONNECT_S = 10.0
LEAVE_S = 10.0  # how long to wait for calls of Ray before the session ends
MOST_SAID = 300  # characters kept of Ray's errors, which may fill a page
MIN_STORE = 256 << 20  # bytes of the object store; a few batches would fill a smaller one
START = "`ray start --head` on one machine, `ray start --address=HOST:6379` on the others"
_lock = threading.RLock()


class User(Protocol):
    """An object that has actors in this process's Ray session."""

    def leave_session(self) -> None:
        """Called when the session ends: its actors and references must no longer be used."""


_users: weakref.WeakSet[User] = weakref.WeakSet()
_begun_here: set[int] = set()  # this process's id, if stoker began the session, not the script


class ClusterError(StokerError):
    """Workers on other nodes cannot be used."""


class NodeInfo(NamedTuple):
    """A node of the cluster."""

    id: str  # Ray's
    name: str  # its host name and address, for messages
    cores: int  # number of cores that Ray may use there
    host: str  # its address


def checked_address(address: str) -> str:
    """Returns the address for ``ray.init``. If empty: ``RAY_ADDRESS``, or the cluster that this machine belongs to.
    Raises UsageError if it is the address of a Ray client."""
    address = address or os.environ.get("RAY_ADDRESS", "") or "auto"
    if address.startswith("ray://"):
        raise UsageError(
            f"{address}: a Ray client copies each batch through a proxy, at 0.16 GB/s. Make this machine a node of the "
            'cluster (ray start --address=HOST:6379) and use "auto"'
        )
    return address


def check_installed() -> None:
    """Raises UsageError if Ray is not installed. Does not import it."""
    if importlib.util.find_spec("ray") is None:
        raise UsageError(EXTRA)


def connect(address: str, user: User) -> ModuleType:
    """Joins the cluster at ``address`` (see ``checked_address``). Returns the module ``ray``. ``user`` is told when the
    session ends. Raises ClusterError if there is no Ray, no cluster, or the object store is too small."""
    with _lock:
        _users.add(user)
        try:
            import cloudpickle  # noqa: F401
            import ray
        except ImportError:
            raise ClusterError(EXTRA) from None
        _watch_session(ray)
        if not ray.is_initialized():
            _check_reachable(address)
            _silence(ray)
            os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
            try:
                ray.init(address=address, log_to_driver=False, configure_logging=False, namespace="stoker")
                _begun_here.add(os.getpid())
            except Exception as e:
                text = " ".join(str(e).split())[:MOST_SAID]
                raise ClusterError(f"no Ray cluster at {address!r} ({type(e).__name__}: {text}); {START}") from e
        store = own_store(ray)
        if store and store < MIN_STORE:
            raise ClusterError(
                f"this node's object store has {store >> 20} MB and batches need {MIN_STORE >> 20}: ray start "
                "--object-store-memory=..., and enough in /dev/shm (docker run --shm-size)"
            )
        if (shared := shared_memory()) < MIN_STORE:
            raise ClusterError(
                f"/dev/shm has {shared >> 20} MB, so Ray would keep batches in files: docker run --shm-size=2g"
            )
        module: ModuleType = ray
        return module


class _Gate:
    """Guards calls of Ray from stoker's threads. A call concurrent with ``ray.shutdown`` would end the process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self.is_shut = False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._changed:
            if self.is_shut:
                raise ClusterError("the Ray session has ended")
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def shut(self) -> None:
        """Stops calls of Ray from now on, and waits for running ones."""
        self.is_shut = True
        for user in list(_users):
            user.leave_session()
        with self._changed:
            self._changed.wait_for(lambda: not self._inside, LEAVE_S)


using_ray = _Gate()


def _watch_session(ray: ModuleType) -> None:
    """Makes threads leave Ray before the script ends the session: by ``ray.shutdown``, or by ``ray.init`` if the
    session was begun here, because that call would otherwise fail."""
    if hasattr(ray, "_stoker_watches"):
        return
    begin, end = ray.init, ray.shutdown

    @functools.wraps(end)
    def shutdown(*args: object, **options: object) -> object:
        using_ray.shut()
        _begun_here.clear()
        try:
            return end(*args, **options)
        finally:
            using_ray.is_shut = False

    @functools.wraps(begin)
    def init(*args: object, **options: object) -> object:
        with _lock:
            if os.getpid() in _begun_here:
                shutdown()
            return begin(*args, **options)

    vars(ray).update(init=init, shutdown=shutdown, _stoker_watches=True)
    atexit.register(using_ray.shut)  # Ray's own exit handler ends the session


def _check_reachable(address: str) -> None:
    """Raises ClusterError if the address does not answer within ``CONNECT_S``; Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        except OSError as e:
            raise ClusterError(f"no Ray cluster at {address!r} ({e.strerror or e}); {START}") from e


def _silence(ray: ModuleType) -> None:
    """Sends Ray's lines about dead workers to the log. Ray prints them to stdout, even with ``log_to_driver=False``."""
    worker = getattr(getattr(ray, "_private", None), "worker", None)
    if worker is not None and hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda data, *_, **__: logger.info("Ray: %s", "; ".join(data.get("lines", [])))
    logging.getLogger("ray").setLevel(logging.ERROR)


def shared_memory() -> int:
    """Returns the total bytes of /dev/shm, which holds Ray's object store, including those in use."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return found.f_blocks * found.f_frsize


def own_store(ray: ModuleType) -> int:
    """Returns the bytes of this node's object store; 0 if Ray does not tell."""
    own = ray.get_runtime_context().get_node_id()
    return next((int(n["Resources"].get("object_store_memory", 0)) for n in ray.nodes() if n["NodeID"] == own), 0)


def beacon(ray: ModuleType) -> socket.socket | None:
    """Makes a socket to which each node connects; None if that fails. Connections are never accepted. The kernel closes
    them when this process ends, even by SIGKILL, and then the actors end. Ray by itself may take twenty seconds."""
    with contextlib.suppress(Exception):
        host = ray.util.get_node_ip_address()
        return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=4096)
    return None


def other_nodes(ray: ModuleType) -> dict[str, NodeInfo]:
    """Returns the nodes that make batches, by id: all live ones except this one and those with GPUs, which train."""
    own = ray.get_runtime_context().get_node_id()
    out = {}
    for node in ray.nodes():
        found = node["Resources"]
        cores = int(found.get("CPU", 0))
        if node["Alive"] and node["NodeID"] != own and cores and not found.get("GPU"):
            host = node["NodeManagerAddress"]
            name = f"{node.get('NodeManagerHostname', '')} ({host}, {node['NodeID'][:6]})"
            out[node["NodeID"]] = NodeInfo(node["NodeID"], name, cores, host)
    return out


def start_actor(ray: ModuleType, node: NodeInfo, calls: int) -> Actor:
    """Starts an actor on a node. ``calls``: number of calls that it answers concurrently."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from .node import NodeWorkers

    actor = ray.remote(NodeWorkers).options(
        num_cpus=0,  # several ranks may have workers on a node, and the kernel divides its cores among them
        max_concurrency=calls,
        max_restarts=0,
        max_task_retries=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
    )
    return actor.remote()


def kill_actor(ray: ModuleType, actor: Actor) -> None:
    """Kills an actor; its workers notice and end."""
    with contextlib.suppress(Exception), using_ray():
        if ray.is_initialized():
            ray.kill(actor)
