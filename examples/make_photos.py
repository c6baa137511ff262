"""Cuts photographs to train on from the ones that scikit-image and scikit-learn ship; nothing is downloaded.

    python examples/make_photos.py [--out examples/data] [--count 4000] [--seed 0]

Writes ``photos/00000.jpg`` ... (512x384, JPEG quality 90) and ``labels.csv`` (``path,label``; the label is the number
of the source photograph). The same seed gives the same bytes, however many processes work. Everything is made in a
folder beside ``--out`` that is renamed when complete, so an interrupted run leaves nothing; what is there already is
kept.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib.util
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

SOURCES = {  # package: its folder and the photographs in it; their order is the labels
    "skimage": (
        "data",
        "astronaut.png brick.png camera.png chelsea.png coffee.png coins.png grass.png gravel.png "
        "hubble_deep_field.jpg ihc.png moon.png motorcycle_left.png motorcycle_right.png retina.jpg rocket.jpg",
    ),
    "sklearn": ("datasets/images", "china.jpg flower.jpg"),
}
SIZE = (512, 384)
QUALITY = 90
LARGEST = 1.5 * SIZE[0]  # pixels of a source across a photograph; more would have to be filtered before it is sampled
SMALLEST = 0.4  # of what the source has room for; less would be a blur when enlarged
TILT = math.radians(8)
CHUNK = 20  # photographs a task: a fraction of a second, so Ctrl-C is answered at once
LINE_S = 5.0  # between lines of progress where there is no terminal
OURS = ("photos", "labels.csv", "complete.json")

_sources: list = []  # in each process: the decoded source photographs


class Failure(Exception):
    """Said to the user without a traceback."""


def find_sources() -> list[Path]:
    """The source photographs, by label. Looked up without importing the packages, which takes seconds."""
    names = {"PIL": "pillow", "skimage": "scikit-image", "sklearn": "scikit-learn"}
    specs = {package: importlib.util.find_spec(package) for package in names}
    missing = [names[package] for package, spec in specs.items() if spec is None]
    if missing:
        raise Failure(f"{' and '.join(missing)} not installed; the extra brings it: pip install 'stoker[demo]'")
    found = []
    for package, (folder, files) in SOURCES.items():
        home = Path(specs[package].origin).parent / folder
        found += [home / name for name in files.split()]
    lost = [str(path) for path in found if not path.is_file()]
    if lost:
        raise Failure(f"not shipped by the installed version: {', '.join(lost)}; pip install 'stoker[demo]' anew")
    return found


def start_process(paths: list[Path]) -> None:
    """Runs first in each process of the pool."""
    from PIL import Image

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    for path in paths:
        with Image.open(path) as image:
            _sources.append(image.convert("RGB"))


def _die_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def cut(folder: Path, seed: int, numbers: range) -> list[tuple[str, int]]:
    """Writes the photographs with these numbers; each depends on the seed and its own number alone."""
    from PIL import Image

    rows = []
    for number in numbers:
        draw = random.Random(f"{seed}/{number}")
        label = draw.randrange(len(_sources))
        source = _sources[label]
        angle = draw.uniform(-TILT, TILT)
        cos, sin = math.cos(angle), math.sin(angle)
        # The tilted window must lie inside the source: its bounding box is `wide` x `high` times its width.
        ratio = SIZE[1] / SIZE[0]
        wide, high = cos + ratio * abs(sin), abs(sin) + ratio * cos
        room = min(source.width / wide, source.height / high)
        width = min(LARGEST, room * draw.uniform(SMALLEST, 1))
        x = draw.uniform(wide * width / 2, source.width - wide * width / 2)
        y = draw.uniform(high * width / 2, source.height - high * width / 2)
        scale = width / SIZE[0]
        across = -scale if draw.random() < 0.5 else scale  # negative: mirrored
        a, b, d, e = across * cos, -scale * sin, across * sin, scale * cos
        matrix = (a, b, x - a * SIZE[0] / 2 - b * SIZE[1] / 2, d, e, y - d * SIZE[0] / 2 - e * SIZE[1] / 2)
        photo = source.transform(SIZE, Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC)
        path = f"photos/{number:05d}.jpg"
        photo.save(folder / path, quality=QUALITY)
        rows.append((path, label))
    return rows


def make(folder: Path, count: int, seed: int, processes: int, sources: list[Path]) -> None:
    """Fills ``folder`` with everything but ``complete.json``."""
    (folder / "photos").mkdir()
    rows: list[tuple[str, int]] = []
    pool = ProcessPoolExecutor(processes, initializer=start_process, initargs=(sources,))
    try:
        with ctrl_c_held():  # the pool's processes inherit this: Ctrl-C is answered here, not once more in each of them
            starts = range(0, count, CHUNK)
            tasks = [pool.submit(cut, folder, seed, range(i, min(i + CHUNK, count))) for i in starts]
        with Progress(count) as progress:
            for task in as_completed(tasks):
                rows += task.result()
                progress.show(len(rows))
    finally:
        pool.shutdown(cancel_futures=True)
    with open(folder / "labels.csv", "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([("path", "label"), *sorted(rows)])


class Progress:
    """One line on stderr, rewritten on a terminal and repeated every few seconds elsewhere."""

    def __init__(self, count: int) -> None:
        self.count, self.began, self.live = count, time.monotonic(), sys.stderr.isatty()
        self.last = self.began

    def show(self, done: int) -> None:
        now = time.monotonic()
        if self.live or now - self.last >= LINE_S:
            text = f"photographs: {done} of {self.count}, {done / (now - self.began):.0f} a second"
            print(f"\r{text}\x1b[K" if self.live else text, end="" if self.live else "\n", file=sys.stderr, flush=True)
            self.last = now

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def ctrl_c_held() -> Iterator[None]:
    """Ctrl-C inside the block is answered at its end."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def put_in_place(made: Path, out: Path) -> None:
    """Renames ``made`` to ``out``; photographs of other parameters go, what others put beside them stays."""
    with ctrl_c_held():
        if out.exists():
            for other in out.iterdir():
                if other.name not in OURS:
                    other.rename(made / other.name)
            old = made.with_name(made.name + "-old")
            out.rename(old)
            made.rename(out)
            shutil.rmtree(old)
        else:
            made.rename(out)


def remove_leftovers(out: Path) -> None:
    """Folders of earlier runs that were killed so that they could not clean up."""
    for path in out.parent.glob(f".{out.name}.making-*"):
        pid = path.name.rpartition("making-")[2].partition("-")[0]
        if pid.isdigit() and not _runs(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _runs(pid: int) -> bool:
    if os.name == "nt":
        return True  # there os.kill would end it
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return pid != os.getpid()


def run(out: Path, count: int, seed: int, processes: int) -> None:
    sources = find_sources()
    names = [path.name for path in sources]
    wanted = {"count": count, "seed": seed, "size": list(SIZE), "quality": QUALITY, "sources": names}
    with contextlib.suppress(OSError, ValueError):
        if json.loads((out / "complete.json").read_text()) == wanted:
            print(f"{out}: {count} photographs are there already", file=sys.stderr)
            return
    if out.exists() and not (out / "complete.json").is_file() and (not out.is_dir() or any(out.iterdir())):
        raise Failure(f"{out} exists and holds no photographs of this script; name another --out, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(out)
    began = time.monotonic()
    made = out.parent / f".{out.name}.making-{os.getpid()}"
    try:
        made.mkdir()
        make(made, count, seed, processes, sources)
        (made / "complete.json").write_text(json.dumps(wanted) + "\n")
        put_in_place(made, out)
    finally:
        with ctrl_c_held():
            shutil.rmtree(made, ignore_errors=True)
    print(f"{out}: {count} photographs made in {time.monotonic() - began:.0f} s", file=sys.stderr)


def cores_granted() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def main() -> int:
    parser = argparse.ArgumentParser(description="Cuts photographs to train on from those that are installed.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data", help="folder (examples/data)")
    parser.add_argument("--count", type=positive, default=4000, help="photographs (4000)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same bytes (0)")
    parser.add_argument("--processes", type=positive, default=cores_granted(), help="the cores granted, if not given")
    args = parser.parse_args()
    # kill(1) is answered like Ctrl-C, only with its own exit code
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        run(args.out, args.count, args.seed, args.processes)
    except KeyboardInterrupt:
        print("make_photos.py: interrupted, nothing left behind", file=sys.stderr)
        return 128 + signal.SIGINT
    except (Failure, OSError) as error:
        print(f"make_photos.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
