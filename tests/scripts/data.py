"""Small data of many kinds for the scripts of this folder: ``python -m tests.scripts.data FOLDER``.

A photograph says which one it is: its red and blue are the same everywhere, and name its number. So whoever gets a crop,
a flip or a smaller copy can tell (``seen.whose``). Volumes and records do likewise with their values.
"""

from __future__ import annotations

import csv
import io
import random
import sqlite3
import struct
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

PHOTOS, VOLUMES, TEXTS = 128, 24, 320
WIDTH, HEIGHT = 160, 120
STEP = 16  # between the colours of one photograph and the next


def pixels(number: int, rng: np.random.Generator) -> np.ndarray:
    """Photograph ``number`` (below 256): uint8, HWC."""
    coarse = rng.integers(0, 256, (HEIGHT // 8, WIDTH // 8), dtype=np.uint8)
    green = np.asarray(Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.BILINEAR))
    out = np.empty((HEIGHT, WIDTH, 3), np.uint8)
    out[..., 0], out[..., 1], out[..., 2] = number // STEP * STEP + STEP // 2, green, number % STEP * STEP + STEP // 2
    return out


def jpeg(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(array).save(file, "JPEG", quality=92, subsampling=0)
    return file.getvalue()


def photos(out: Path, rng: np.random.Generator) -> None:
    """``photos/0000.jpg``, ``masks/0000.png``, ``labels.csv``; and the same in a database, an archive, and tar files."""
    made = []
    for folder in ("photos", "masks", "shards"):
        (out / folder).mkdir()
    with open(out / "labels.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "label"])
        for i in range(PHOTOS):
            array = pixels(i, rng)
            made.append(jpeg(array))
            (out / f"photos/{i:04d}.jpg").write_bytes(made[-1])
            Image.fromarray((array[..., 1] > 127).astype(np.uint8)).save(out / f"masks/{i:04d}.png")
            rows.writerow([f"photos/{i:04d}.jpg", i % 10])
    with sqlite3.connect(out / "photos.sqlite") as base:
        base.execute("create table photos (id integer primary key, label integer, jpeg blob)")
        base.executemany("insert into photos values (?, ?, ?)", [(i, i % 10, b) for i, b in enumerate(made)])
    base.close()
    with zipfile.ZipFile(out / "photos.zip", "w") as archive:
        for i, b in enumerate(made):
            archive.writestr(f"{i:04d}.jpg", b)
    for shard in range(4):
        with tarfile.open(out / f"shards/{shard}.tar", "w") as tar:
            for i in range(shard, PHOTOS, 4):
                for suffix, b in (("jpg", made[i]), ("cls", str(i % 10).encode())):
                    entry = tarfile.TarInfo(f"{i:04d}.{suffix}")
                    entry.size = len(b)
                    tar.addfile(entry, io.BytesIO(b))


def volumes(out: Path, rng: np.random.Generator) -> None:
    """``volumes/00.npy``, int16: 1000 x its number, and up to 999 of noise."""
    (out / "volumes").mkdir()
    for i in range(VOLUMES):
        np.save(out / f"volumes/{i:02d}.npy", (1000 * i + rng.integers(0, 1000, (40, 40, 40))).astype(np.int16))


def texts(out: Path) -> None:
    """``texts.csv``: a label and a text of 30 to 120 words."""
    rng = random.Random(4)
    with open(out / "texts.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label"])
        for i in range(TEXTS):
            rows.writerow([" ".join(f"w{rng.randrange(500)}" for _ in range(rng.randint(30, 120))), i % 4])


def records(out: Path, rng: np.random.Generator) -> None:
    """``records.bin``: 512 records of an int32, its number, and 256 float32."""
    with open(out / "records.bin", "wb") as file:
        for i in range(512):
            file.write(struct.pack("<i", i) + rng.standard_normal(256).astype("<f4").tobytes())


def make(out: Path) -> Path:
    """All of it, in a folder that does not exist yet."""
    out.mkdir(parents=True)
    rng = np.random.default_rng(11)
    photos(out, rng)
    volumes(out, rng)
    texts(out)
    records(out, rng)
    return out


if __name__ == "__main__":
    make(Path(sys.argv[1]))
