"""One loader that spreads over two nodes: ``python -m benchmarks.peers.nodes NAME`` prints a JSON line for each epoch.

Runs in the peer's environment. Nodes are on this machine: of a Ray cluster (``ray.cluster_utils.Cluster``), or a
process each (tf.data service). Each epoch is asked for in a drawn order, and a sample's label is the place of its
picture in that order. So the labels say whether the order holds, and whether a sample is lost or comes twice. In the
last epoch a worker is killed (SIGKILL) after a quarter of the batches. Memory is proportional (PSS), of all processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .drive import _pixels, _rows

NODES, CORES = 2, 2
PICTURES, BATCH = 1000, 32
LOOK_S = 0.5  # between two looks at the memory
EPOCHS = ("first", "second", "worker killed")
PORTS = (5050, 5051, 5052)  # of tf.data service: dispatcher and workers
WORKER_MS = 10_000  # after which its dispatcher gives a worker up; ten minutes if nothing is said
STALL_S = 90  # without a batch: the epoch is left
Numbers = list[int]
Epoch = Callable[[], Iterator[Any]]  # of arrays of places


def drawn_rows() -> list[tuple[str, int]]:
    """Path and place of each picture, in the order that is asked for."""
    paths = [path for path, _ in _rows()[:PICTURES]]
    random.Random(0).shuffle(paths)
    return [(path, place) for place, path in enumerate(paths)]


class Pictures:
    """A dataset as torch has them."""

    def __init__(self) -> None:
        self.rows = drawn_rows()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        path, place = self.rows[i]
        return _pixels(path), place


@contextlib.contextmanager
def ray_nodes() -> Iterator[Any]:
    """A cluster: this process' node, and the others."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 1 << 30})
    for _ in range(NODES):
        cluster.add_node(num_cpus=CORES, object_store_memory=1 << 30)
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        yield ray
    finally:
        ray.shutdown()
        with contextlib.suppress(ValueError):  # the node of this process cannot be removed
            cluster.shutdown()


@contextlib.contextmanager
def stoker() -> Iterator[tuple[Epoch, str]]:
    """What is killed is an actor, and with it all workers of a node."""
    import stoker

    from ..cluster import wait_for

    with ray_nodes():
        loader = stoker.DataLoader(Pictures(), BATCH, num_workers=1, worker_method="ray", task_seeds=True)
        wait_for(loader, NODES)
        yield lambda: (touched(x, place) for x, place in loader), "ray::NodeWorkers"


@contextlib.contextmanager
def ray_data(preserve_order: bool = False) -> Iterator[tuple[Epoch, str]]:
    """What is killed is one of the processes that run its tasks."""
    with ray_nodes() as ray:
        ray.init(address=os.environ["RAY_ADDRESS"], logging_level="ERROR", log_to_driver=False)
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_options.preserve_order = preserve_order

        def one(row: Any) -> Any:
            return {"x": _pixels(row["path"]), "place": row["place"]}

        def epoch() -> Iterator[Any]:
            rows = [{"path": path, "place": place} for path, place in drawn_rows()]
            data = ray.data.from_items(rows, override_num_blocks=40).map(one)
            for batch in data.iter_torch_batches(batch_size=BATCH, prefetch_batches=2):
                yield touched(batch["x"], batch["place"])

        yield epoch, "ray::Map"


@contextlib.contextmanager
def ray_data_ordered() -> Iterator[tuple[Epoch, str]]:
    with ray_data(preserve_order=True) as made:
        yield made


def serve(what: str, port: str) -> None:
    """A process of tf.data service."""
    import tensorflow as tf

    service = tf.data.experimental.service
    if what == "dispatcher":
        patience = {"worker_timeout_ms": WORKER_MS, "job_gc_check_interval_ms": WORKER_MS // 2}
        server = service.DispatchServer(service.DispatcherConfig(port=int(port), **patience))
    else:
        address = f"localhost:{PORTS[0]}"
        config = service.WorkerConfig(dispatcher_address=address, worker_address=f"localhost:{port}", port=int(port))
        server = service.WorkerServer(config)
    server.join()


@contextlib.contextmanager
def tf_service() -> Iterator[tuple[Epoch, str]]:
    """Sharding is dynamic: of its policies that which promises each sample once. What is killed is a node's worker, and
    another one is started at its address, as whoever runs the service does: without it the epoch does not end."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)

    def one(path: Any, place: Any) -> Any:
        x = tf.image.resize(tf.io.decode_jpeg(tf.io.read_file(path), 3), (96, 128), antialias=True)
        x = tf.image.random_flip_left_right(x[16:80, 32:96])
        return tf.transpose(x, (2, 0, 1)) / 255.0, place

    servers = []
    ended = threading.Event()

    def start(what: str, port: int) -> None:
        command = [sys.executable, "-m", "benchmarks.peers.nodes", "serve", what, str(port)]
        servers.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))

    def replace_last(dead: subprocess.Popen[bytes]) -> None:
        dead.wait()
        if not ended.is_set():
            start("worker", PORTS[-1])

    try:
        for port in PORTS:
            start("dispatcher" if port == PORTS[0] else "worker", port)
        threading.Thread(target=replace_last, args=(servers[-1],), daemon=True).start()
        rows = drawn_rows()
        data = tf.data.Dataset.from_tensor_slices(([path for path, _ in rows], [place for _, place in rows]))
        data = data.map(one, num_parallel_calls=CORES).batch(BATCH)
        policy = tf.data.experimental.service.ShardingPolicy.DYNAMIC
        service = f"grpc://localhost:{PORTS[0]}"  # waited for where the dataset is registered
        data = data.apply(tf.data.experimental.service.distribute(policy, service, compression=None)).prefetch(2)
        yield lambda: (touched(x, place) for x, place in data.as_numpy_iterator()), f"serve worker {PORTS[-1]}"
    finally:
        ended.set()
        for p in servers:
            p.kill()
            p.wait()


CONTESTANTS = {
    "stoker": stoker,
    "Ray Data": ray_data,
    "Ray Data, preserve_order": ray_data_ordered,
    "tf.data service": tf_service,
}


def touched(x: Any, places: Any) -> Numbers:
    """What a consumer does at least: one float of each page."""
    x.reshape(-1)[::1024].sum()
    return [int(i) for i in np.asarray(places)]


def processes() -> list[tuple[int, str]]:
    """This process and all that descend from it, with their command lines."""
    children: dict[int, Numbers] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    out, todo = [], [os.getpid()]
    while todo:
        pid = todo.pop()
        todo += children.get(pid, [])
        with contextlib.suppress(OSError):
            out.append((pid, Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")))
    return out


def memory() -> int:
    """Bytes of all processes together; what several share counts once."""
    kilobytes = 0
    for pid, _ in processes():
        with contextlib.suppress(OSError, IndexError):
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            kilobytes += int(rollup.partition("\nPss:")[2].split()[0])
    return kilobytes << 10


class Watch:
    """Sees the most memory that is taken while it is entered."""

    def __enter__(self) -> Watch:
        self.most = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._end.wait(LOOK_S):
            self.most = max(self.most, memory())

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def kill(what: str) -> bool:
    """Kills the first process whose command line has these words."""
    for pid, line in processes():
        if what in line:
            os.kill(pid, signal.SIGKILL)
            return True
    return False


def arrivals(epoch: Epoch) -> Iterator[Numbers]:
    """What an epoch yields, from a thread that may be left behind.

    Raises:
        queue.Empty: nothing came for ``STALL_S`` seconds.
    """
    came: queue.Queue[Any] = queue.Queue(1)

    def run() -> None:
        try:
            for places in epoch():
                came.put(places)
            came.put(None)
        except Exception as e:
            came.put(e)

    threading.Thread(target=run, daemon=True).start()
    while (places := came.get(timeout=STALL_S)) is not None:
        if isinstance(places, Exception):
            raise places
        yield places


def measure(epoch: Epoch, victim: str) -> dict[str, Any]:
    """One epoch. ``victim``: empty, or what is killed."""
    came: Numbers = []
    killed, error, began = False, "", time.perf_counter()
    with Watch() as watch:
        try:
            for places in arrivals(epoch):
                came += places
                if victim and not killed and len(came) > PICTURES // 4:
                    killed = kill(victim)
        except queue.Empty:
            error = f"no batch for {STALL_S} s"
        except Exception as e:
            error = type(e).__name__
        seconds = time.perf_counter() - began
    counts = Counter(came)
    return {
        "rate": len(came) / seconds,
        "memory": watch.most,
        "in order": came == sorted(set(came)),
        "missing": PICTURES - len(counts),
        "twice": sum(n > 1 for n in counts.values()),
        "killed": killed,
        "error": error,
    }


def version(name: str) -> str:
    from importlib import metadata

    package = {"stoker": "stoker", "tf.data service": "tensorflow-cpu"}.get(name, "ray")
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def main(name: str) -> None:
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_worker_niceness", "0")  # 15 if nothing is said, and tf.data service's have 0
    with CONTESTANTS[name]() as (epoch, victim):
        for what in EPOCHS:
            line = measure(epoch, victim if what == EPOCHS[-1] else "")
            print(json.dumps({"epoch": what, "version": version(name), **line}), flush=True)
    os._exit(0)  # a thread may still wait for a batch


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(*sys.argv[2:])
    else:
        main(sys.argv[1])
