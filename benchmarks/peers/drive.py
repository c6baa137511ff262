"""One peer on one workload: ``python -m benchmarks.peers.drive PEER WORKLOAD`` prints JSON lines.

Runs in the peer's environment. A driver gives a function that begins an epoch; each does what its project's
documentation shows, with two workers. Batches end as torch tensors where the project makes these, else (tf.data, grain,
DALI) as NumPy arrays.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

WORKERS, AHEAD = 2, 2
BATCH = {"jpeg": 100, "transport": 256, "overhead": 64}
Epoch = Callable[[], Iterator[Any]]


def _dataset(workload: str) -> Any:
    from .. import workloads as w

    return {"jpeg": lambda: w.Photos(w.photos()), "transport": w.Big, "overhead": w.Tiny}[workload]()


def _rows() -> list[tuple[str, int]]:
    import csv

    root = Path(__file__).parent.parent.parent
    for folder in (root / "examples" / "data", root / "benchmarks" / "data"):
        if (folder / "labels.csv").is_file():
            with open(folder / "labels.csv", newline="") as file:
                return [(str(folder / r["path"]), int(r["label"])) for r in csv.DictReader(file)]
    raise FileNotFoundError("no photographs: python examples/make_photos.py --out benchmarks/data --count 4000")


def _pixels(file: Any) -> Any:
    """Float CHW from a photograph, flipped by chance: what ``workloads.Photos`` does, in NumPy."""
    image = Image.open(file).convert("RGB").resize((128, 96)).crop((32, 16, 96, 80))
    x = np.asarray(image).transpose(2, 0, 1).astype(np.float32) / 255
    return np.ascontiguousarray(x[:, :, ::-1]) if random.random() < 0.5 else x


def _torch_like(cls: Any, workload: str, **more: Any) -> Epoch:
    kw = {"batch_size": BATCH[workload], "num_workers": WORKERS, "shuffle": workload == "jpeg", **more}
    loader = cls(_dataset(workload), persistent_workers=True, **kw)
    return lambda: iter(loader)


def torch_loader(workload: str) -> Epoch:
    from torch.utils.data import DataLoader

    return _torch_like(DataLoader, workload)


def stoker(workload: str) -> Epoch:
    from stoker import DataLoader

    return _torch_like(DataLoader, workload)


def stoker_threads(workload: str) -> Epoch:
    from stoker import DataLoader

    return _torch_like(DataLoader, workload, worker_method="thread")


def stateful(workload: str) -> Epoch:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return _torch_like(StatefulDataLoader, workload)


def nodes(workload: str, method: str = "thread") -> Epoch:
    import torchdata.nodes as tn
    from torch.utils.data import RandomSampler, SequentialSampler, default_collate

    dataset = _dataset(workload)
    sampler: Any = RandomSampler(dataset) if workload == "jpeg" else SequentialSampler(dataset)
    node: Any = tn.Batcher(tn.SamplerWrapper(sampler), BATCH[workload], drop_last=False)
    kw = {"multiprocessing_context": "fork"} if method == "process" else {}
    node = tn.ParallelMapper(node, _Fetch(dataset, default_collate), num_workers=WORKERS, method=method, **kw)
    loader = tn.Loader(tn.Prefetcher(node, prefetch_factor=AHEAD))
    return lambda: iter(loader)


def nodes_processes(workload: str) -> Epoch:
    return nodes(workload, "process")


class _Fetch:
    def __init__(self, dataset: Any, collate: Any) -> None:
        self.dataset, self.collate = dataset, collate

    def __call__(self, indices: Any) -> Any:
        return self.collate([self.dataset[i] for i in indices])


def spdl(workload: str, own: bool = True) -> Epoch:
    """Threads, a batch an operation; photographs by its own decoder and scaler, which want FFmpeg's libraries."""
    import spdl.io
    import spdl.pipeline
    import torch
    from torch.utils.data import default_collate

    size = BATCH[workload]
    if workload == "jpeg" and own:
        rows = _rows()
        spdl.io.demux_image(rows[0][0])  # fails here, and not in a thread, where the libraries are not there
        how = "scale=width=128:height=96:flags=bilinear,crop=w=64:h=64,format=pix_fmts=rgb24"

        def source() -> Iterator[Any]:
            order = torch.randperm(len(rows)).tolist()
            for at in range(0, len(order), size):
                yield [rows[i] for i in order[at : at + size]]

        def one(path: str) -> Any:
            frames = spdl.io.decode_packets(spdl.io.demux_image(path), filter_desc=how)
            return spdl.io.to_numpy(spdl.io.convert_frames(frames))

        def work(batch: Any) -> Any:
            x = torch.from_numpy(np.stack([one(path) for path, _ in batch]))
            flip = torch.rand(len(x)) < 0.5
            x = torch.where(flip[:, None, None, None], x.flip(2), x).permute(0, 3, 1, 2)
            return x.to(torch.float32, memory_format=torch.contiguous_format).div_(255), torch.tensor(
                [y for _, y in batch]
            )
    else:
        dataset = _dataset(workload)

        def source() -> Iterator[Any]:
            order = torch.randperm(len(dataset)).tolist() if workload == "jpeg" else range(len(dataset))
            for at in range(0, len(order), size):
                yield order[at : at + size]

        def work(batch: Any) -> Any:
            return default_collate([dataset[i] for i in batch])

    def epoch() -> Iterator[Any]:
        builder = spdl.pipeline.PipelineBuilder().add_source(source())
        builder = builder.pipe(work, concurrency=WORKERS, output_order="input").add_sink(AHEAD)
        pipeline = builder.build(num_threads=WORKERS)
        with pipeline.auto_stop():
            yield from pipeline

    return epoch


def spdl_pillow(workload: str) -> Epoch:
    return spdl(workload, own=False)


class _GrainSource:
    def __init__(self, workload: str) -> None:
        self.workload = workload
        self.rows = _rows() if workload == "jpeg" else None
        self.base = np.random.default_rng(0).standard_normal((64, 3, 224, 224), dtype=np.float32)
        self.n = {"jpeg": len(self.rows or ()), "transport": 256 * 24, "overhead": 64 * 2000}[workload]

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: Any) -> Any:
        if self.rows is not None:
            return self.rows[int(i)][0]
        return self.base[int(i) & 63] if self.workload == "transport" else np.int64(i)


def grain(workload: str) -> Epoch:
    """Read threads."""
    import contextlib

    import grain as g

    with contextlib.suppress(Exception):
        from absl import flags

        flags.FLAGS(sys.argv[:1])
    source = _GrainSource(workload)

    def epoch() -> Iterator[Any]:
        d = g.MapDataset.source(source).seed(random.randrange(1 << 30))
        if workload == "jpeg":
            d = d.shuffle().map(_pixels)
        options = g.ReadOptions(num_threads=WORKERS, prefetch_buffer_size=WORKERS * AHEAD)
        return iter(d.batch(BATCH[workload]).to_iter_dataset(options))

    return epoch


def webdataset(workload: str) -> Epoch:
    """Photographs in eight tar files, read by torch's workers."""
    import torch
    import webdataset as wds

    folder = Path(tempfile.mkdtemp(prefix="stoker-bench-"))
    rows = _rows()
    for k in range(8):
        with tarfile.open(folder / f"{k:03d}.tar", "w") as tar:
            for i in range(k, len(rows), 8):
                for name, data in (
                    (f"{i:06d}.jpg", Path(rows[i][0]).read_bytes()),
                    (f"{i:06d}.cls", str(rows[i][1]).encode()),
                ):
                    info = tarfile.TarInfo(name)
                    info.size = len(data)
                    tar.addfile(info, BytesIO(data))

    def sample(s: Any) -> Any:
        return torch.from_numpy(_pixels(BytesIO(s["jpg"]))), int(s["cls"])

    urls = sorted(str(p) for p in folder.glob("*.tar"))
    dataset = wds.WebDataset(urls, shardshuffle=8, nodesplitter=wds.split_by_node, workersplitter=wds.split_by_worker)
    dataset = dataset.shuffle(500).map(sample).batched(100)
    loader = wds.WebLoader(
        dataset, batch_size=None, num_workers=WORKERS, persistent_workers=True, multiprocessing_context="fork"
    )
    return lambda: iter(loader)


def tf_data(workload: str) -> Epoch:
    """decode, antialiased resize, crop, flip in its graph; two threads."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(WORKERS)
    rows = _rows()

    def one(path: Any, label: Any) -> Any:
        x = tf.image.resize(tf.io.decode_jpeg(tf.io.read_file(path), 3), (96, 128), antialias=True)
        x = tf.image.random_flip_left_right(x[16:80, 32:96])
        return tf.transpose(x, (2, 0, 1)) / 255.0, label

    d = tf.data.Dataset.from_tensor_slices(([p for p, _ in rows], [y for _, y in rows])).shuffle(len(rows))
    d = d.map(one, num_parallel_calls=WORKERS).batch(100).prefetch(AHEAD)
    return lambda: d.as_numpy_iterator()


def ray_data(workload: str) -> Epoch:
    import ray

    ray.init(num_cpus=WORKERS, logging_level="ERROR", include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = _rows()

    def one(row: Any) -> Any:
        return {"x": _pixels(row["path"]), "y": row["label"]}

    def epoch() -> Iterator[Any]:
        d = ray.data.from_items([{"path": p, "label": y} for p, y in rows], override_num_blocks=20)
        for batch in d.random_shuffle().map(one).iter_torch_batches(batch_size=100, prefetch_batches=AHEAD):
            yield batch["x"], batch["y"]

    return epoch


def dali(workload: str) -> Epoch:
    """Its CPU mode."""
    from nvidia.dali import fn, pipeline_def, types

    rows = _rows()

    @pipeline_def(batch_size=100, num_threads=WORKERS, device_id=None, prefetch_queue_depth=AHEAD, exec_dynamic=False)
    def pipe() -> Any:
        files, labels = [p for p, _ in rows], [y for _, y in rows]
        data, label = fn.readers.file(files=files, labels=labels, random_shuffle=True, initial_fill=len(rows), name="r")
        x = fn.decoders.image(data, device="cpu", output_type=types.RGB, use_fast_idct=False)
        x = fn.resize(x, resize_x=128, resize_y=96, interp_type=types.INTERP_LINEAR, antialias=True)
        x = fn.crop_mirror_normalize(
            x,
            crop=(64, 64),
            mirror=fn.random.coin_flip(),
            dtype=types.FLOAT,
            mean=[0.0] * 3,
            std=[255.0] * 3,
            output_layout="CHW",
        )
        return x, label

    p = pipe()
    p.build()

    def epoch() -> Iterator[Any]:
        for _ in range(len(rows) // 100):
            x, y = p.run()
            yield np.array(x.as_tensor()), np.array(y.as_tensor())

    return epoch


def ffcv(workload: str) -> Epoch:
    """Its own file format, written beforehand; it decodes a crop of each photograph."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.decoders import CenterCropRGBImageDecoder, IntDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor, ToTorchImage
    from ffcv.writer import DatasetWriter

    class Images:
        def __init__(self) -> None:
            self.rows = _rows()

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, i: int) -> Any:
            path, label = self.rows[i]
            return Image.open(path).convert("RGB"), label

    path = str(Path(tempfile.mkdtemp(prefix="stoker-bench-")) / "photos.beton")
    fields = {"x": RGBImageField(write_mode="jpg"), "y": IntField()}
    DatasetWriter(path, fields, num_workers=WORKERS).from_indexed_dataset(Images())
    image = [CenterCropRGBImageDecoder((64, 64), 2 / 3), RandomHorizontalFlip(), ToTensor(), ToTorchImage()]
    pipelines = {"x": image, "y": [IntDecoder(), ToTensor()]}
    loader = Loader(
        path,
        batch_size=100,
        num_workers=WORKERS,
        order=OrderOption.RANDOM,
        pipelines=pipelines,
        os_cache=True,
        batches_ahead=AHEAD,
    )
    return lambda: ((x.float().div_(255), y) for x, y in loader)


DRIVERS: dict[str, Callable[[str], Epoch]] = {
    "stoker": stoker,
    "stoker threads": stoker_threads,
    "torch": torch_loader,
    "torchdata StatefulDataLoader": stateful,
    "torchdata nodes, threads": nodes,
    "torchdata nodes, processes": nodes_processes,
    "spdl, own decoder": spdl,
    "spdl, Pillow": spdl_pillow,
    "grain": grain,
    "webdataset": webdataset,
    "tf.data": tf_data,
    "ray.data": ray_data,
    "DALI, CPU": dali,
    "ffcv": ffcv,
}
JPEG_ONLY = ("spdl, own decoder", "webdataset", "tf.data", "ray.data", "DALI, CPU", "ffcv")


def touch(batch: Any) -> int:
    """What a consumer does at least: one float of each page of a large array, one of a small. Returns the samples."""
    x = batch[0] if isinstance(batch, (list, tuple)) else batch
    if x.nbytes > 4096:
        x.reshape(-1)[::1024].sum()
    else:
        x[0]
    return len(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=DRIVERS)
    parser.add_argument("workload", choices=BATCH)
    parser.add_argument("--epochs", type=int, default=3)
    a = parser.parse_args()
    begin = DRIVERS[a.peer](a.workload)
    for epoch in range(1, a.epochs + 1):
        batches = samples = 0
        began = time.perf_counter()
        for batch in begin():
            samples += touch(batch)
            batches += 1
        s = time.perf_counter() - began
        if not samples:
            sys.exit("no batch came")
        value = {"jpeg": samples / s, "transport": samples * 3 * 224 * 224 * 4 / s / 1e9, "overhead": batches / s}
        print(json.dumps({"metric": a.workload, "epoch": epoch, "value": value[a.workload], "seconds": s}), flush=True)


if __name__ == "__main__":
    main()
