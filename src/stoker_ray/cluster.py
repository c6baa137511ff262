"""The connection to a Ray cluster, and which of its nodes make batches.

A cluster is joined and never started: the trainer has to be a node of it (``ray start --address=... `` on its machine).
If the script itself uses Ray, its session is used, and never shut down here. If it calls ``ray.init`` when a session
has been begun here, that one ends, and nodes are looked for in the script's.
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
Actor: TypeAlias = Any  # a handle of Ray's, whose methods are looked up by name
CONNECT_S = 10.0
LEAVE_S = 10.0  # that calls of Ray may take when the session is to end
MOST_SAID = 300  # characters of an error of Ray's, which may be a page
MIN_STORE = 256 << 20  # bytes of the object store; of less, a few batches fill it
START = "`ray start --head` on one machine, `ray start --address=HOST:6379` on the others"
_lock = threading.RLock()


class User(Protocol):
    """Who has actors of this process' Ray session."""

    def leave_session(self) -> None:
        """The session ends now: its actors and references are not to be used any more."""


_users: weakref.WeakSet[User] = weakref.WeakSet()
_begun_here: set[int] = set()  # this process, if the session is not the script's


class ClusterError(StokerError):
    """Why workers on other nodes cannot be used."""


class NodeInfo(NamedTuple):
    """A node of the cluster.

    Attributes:
        id: Ray's.
        name: its host name and address, for messages.
        cores: that Ray may use there.
        host: its address.
    """

    id: str
    name: str
    cores: int
    host: str


def checked_address(address: str) -> str:
    """The address as ``ray.init`` takes it; empty: ``RAY_ADDRESS``, or the cluster that this machine is a node of.

    Raises:
        UsageError: it is that of a Ray client.
    """
    address = address or os.environ.get("RAY_ADDRESS", "") or "auto"
    if address.startswith("ray://"):
        raise UsageError(
            f"{address}: a Ray client copies each batch through a proxy, at 0.16 GB/s. Make this machine a node of the "
            'cluster (ray start --address=HOST:6379) and use "auto"'
        )
    return address


def check_installed() -> None:
    """Whether there is Ray, without importing it.

    Raises:
        UsageError: no.
    """
    if importlib.util.find_spec("ray") is None:
        raise UsageError(EXTRA)


def connect(address: str, user: User) -> ModuleType:
    """Joins the cluster. Returns the module ``ray``.

    Args:
        address: see ``checked_address``.
        user: is told when the session ends that is begun here.

    Raises:
        ClusterError: there is no Ray, no cluster, or too small an object store.
    """
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
    """Threads of stoker's that call Ray. A call beside ``ray.shutdown`` would end the process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._shut = False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._changed:
            if self._shut:
                raise ClusterError("the Ray session has ended")
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def shut(self) -> None:
        """From now on nobody calls Ray."""
        self._shut = True
        for user in list(_users):
            user.leave_session()
        with self._changed:
            self._changed.wait_for(lambda: not self._inside, LEAVE_S)

    def open(self) -> None:
        self._shut = False


using_ray = _Gate()


def _watch_session(ray: ModuleType) -> None:
    """Threads leave Ray before the script ends the session: by ``ray.shutdown``, or by ``ray.init`` if it was begun
    here, for that would fail."""
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
            using_ray.open()

    @functools.wraps(begin)
    def init(*args: object, **options: object) -> object:
        with _lock:
            if os.getpid() in _begun_here:
                shutdown()
            return begin(*args, **options)

    vars(ray).update(init=init, shutdown=shutdown, _stoker_watches=True)
    atexit.register(using_ray.shut)  # Ray's own function ends the session


def _check_reachable(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        except OSError as e:
            raise ClusterError(f"no Ray cluster at {address!r} ({e.strerror or e}); {START}") from e


def _silence(ray: ModuleType) -> None:
    """Ray prints about dead workers to the script's standard output, also with ``log_to_driver=False``. These lines go
    to the log."""
    worker = getattr(getattr(ray, "_private", None), "worker", None)
    if worker is not None and hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda data, *_, **__: logger.info("Ray: %s", "; ".join(data.get("lines", [])))
    logging.getLogger("ray").setLevel(logging.ERROR)


def shared_memory() -> int:
    """Bytes of /dev/shm, used ones too; that of Ray's object store."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return found.f_blocks * found.f_frsize


def own_store(ray: ModuleType) -> int:
    """Bytes of this node's object store; 0 where Ray does not say."""
    own = ray.get_runtime_context().get_node_id()
    return next((int(n["Resources"].get("object_store_memory", 0)) for n in ray.nodes() if n["NodeID"] == own), 0)


def beacon(ray: ModuleType) -> socket.socket | None:
    """A socket to which each node connects; None where none can be made.

    Nobody accepts. The kernel ends the connections when this process ends, also by SIGKILL, and actors end then. Ray by
    itself may take twenty seconds.
    """
    with contextlib.suppress(Exception):
        host = ray.util.get_node_ip_address()
        return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=4096)
    return None


def other_nodes(ray: ModuleType) -> dict[str, NodeInfo]:
    """The nodes that make batches, by id: all that are alive, but this one, and those with GPUs (they train)."""
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
    """An actor on a node.

    Args:
        ray: the module.
        node: where.
        calls: that it answers at a time.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from .node import NodeWorkers

    actor = ray.remote(NodeWorkers).options(
        num_cpus=0,  # several ranks have workers on a node, and the kernel divides its cores among them
        max_concurrency=calls,
        max_restarts=0,
        max_task_retries=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
    )
    return actor.remote()


def kill_actor(ray: ModuleType, actor: Actor) -> None:
    """Ends an actor; its workers see that it has gone."""
    with contextlib.suppress(Exception), using_ray():
        if ray.is_initialized():
            ray.kill(actor)
