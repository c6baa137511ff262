"""What a sample costs: decoded again, asked for by TCP, asked for by a call of a Ray actor. See peers.md."""

import io
import os
import socket
import statistics
import struct
import sys
import time

import numpy as np
from PIL import Image

SAMPLES, NBYTES, ROUNDS = 64, 224 * 224 * 3, 25


def jpeg(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (40, 50, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((640, 480), Image.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def decoded(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB").resize((224, 224), Image.BILINEAR)).reshape(-1)


def serve(server: socket.socket, table: np.ndarray) -> None:
    connection, _ = server.accept()
    while header := connection.recv(4):
        (n,) = struct.unpack("<i", header)
        for i in np.frombuffer(connection.recv(4 * n, socket.MSG_WAITALL), np.int32):
            connection.sendall(table[i].data)
    os._exit(0)


def ask(connection: socket.socket, indices: list[int], out: np.ndarray) -> None:
    connection.sendall(struct.pack("<i", len(indices)) + np.asarray(indices, np.int32).tobytes())
    left = memoryview(out[: len(indices)].reshape(-1))
    while len(left):
        left = left[connection.recv_into(left) :]


def actor_on_another_node(table: np.ndarray):
    import ray
    from ray.cluster_utils import Cluster
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 300 << 20})
    node = cluster.add_node(num_cpus=1, object_store_memory=300 << 20)
    ray.init(address=cluster.address, log_to_driver=False)

    @ray.remote(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False))
    class Owner:
        def __init__(self, table: np.ndarray) -> None:
            self.table = np.array(table)

        def get(self, indices: list[int]) -> np.ndarray:
            return self.table[indices]

    owner = Owner.remote(table)
    return lambda indices: ray.get(owner.get.remote(indices))


def main() -> None:
    files = [jpeg(k) for k in range(SAMPLES)]
    table = np.stack([decoded(data) for data in files])
    server = socket.create_server(("127.0.0.1", 0))
    if not os.fork():
        serve(server, table)
    connection = socket.create_connection(server.getsockname())
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    out = np.empty((SAMPLES, NBYTES), np.uint8)
    ways = {
        "make": lambda indices: [decoded(files[i]) for i in indices],
        "tcp": lambda indices: ask(connection, indices, out),
    }
    if "ray" in sys.argv:
        ways["ray"] = actor_on_another_node(table)
        ways["ray"]([0])
    took: dict[tuple[str, int], list[tuple[float, float]]] = {}
    rng = np.random.default_rng(0)
    for _ in range(ROUNDS):
        for n in (1, 16, 48):
            indices = rng.permutation(SAMPLES)[:n].tolist()
            for name, way in ways.items():
                began, cpu = time.perf_counter(), time.process_time()
                way(indices)
                row = (time.perf_counter() - began) / n * 1e3, (time.process_time() - cpu) / n * 1e3
                took.setdefault((name, n), []).append(row)
            assert np.array_equal(out[:n], table[indices])
    for (name, n), rows in took.items():
        wall, cpu = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{name:5} {n:3} at once: {wall:.3f} ms a sample, {cpu:.3f} ms of processor time")


main()
