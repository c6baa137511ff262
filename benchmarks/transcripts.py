"""What commands print, as pages in docs show it: ``python -m benchmarks.transcripts NAME``.

Each runs real commands in a folder of its own, 80 columns wide. ``python -m benchmarks.pages transcripts`` puts them
all into their pages anew.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMIT_S = 120
PHOTOS = 120

CLIPS = """
    import time

    import torch
    from torch.utils.data import DataLoader, Dataset


    class Clips(Dataset):
        def __len__(self):
            return 1000

        def __getitem__(self, index):
            time.sleep(0.0015)
            return torch.full((64,), float(index))


    if __name__ == "__main__":
        loader = DataLoader(Clips(), batch_size=8)
        for epoch in range(2):
            for batch in loader:
                time.sleep(0.009)
"""
PICTURES = """
    from pathlib import Path

    import numpy as np
    import torch
    from PIL import Image
    from torch.utils.data import DataLoader, Dataset


    class Photos(Dataset):
        def __init__(self, size=None):
            self.files, self.size = sorted(str(p) for p in Path("data/photos").iterdir()), size

        def __len__(self):
            return len(self.files)

        def __getitem__(self, index):
            image = Image.open(self.files[index]).convert("RGB")
            return np.array(image if self.size is None else image.resize(self.size))


    photos = Photos()


    def make_loader():
        return DataLoader(Photos((64, 64)), batch_size=16, shuffle=True, num_workers=2)
"""
DISK = """
    import time

    import torch
    from torch.utils.data import DataLoader, Dataset


    class Disk(Dataset):
        def __len__(self):
            return 10_000

        def __getitem__(self, index):
            time.sleep(0.002)
            return torch.zeros(64)


    def make_loader():
        return DataLoader(Disk(), batch_size=16, shuffle=True)
"""
CROPS = """
    import torch
    from torch.utils.data import Dataset


    class Photos(Dataset):
        def __init__(self, folder):
            self.folder = folder

        def __len__(self):
            return 400

        def __getitem__(self, index):
            image = torch.full((64, 64), float(index))
            for _ in range(20):
                image = torch.fft.fft2(image).abs().log1p()
            top, left = torch.randint(0, 9, (2,)).tolist()
            return image[top : top + 56, left : left + 56]
"""
SPECTRA = """
    import random

    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset


    class Spectra(Dataset):
        def __len__(self):
            return 500

        def __getitem__(self, index):
            image = torch.full((256, 256), float(index)) + random.random()
            for _ in range(30):
                image = torch.fft.fft2(image).abs().log1p()
            return image


    if __name__ == "__main__":
        net = nn.Sequential(nn.Flatten(), nn.Linear(256 * 256, 10))
        for epoch in range(2):
            for batch in DataLoader(Spectra(), batch_size=8, shuffle=True, num_workers=2):
                net(batch).sum().backward()
"""
USE_CACHE = """
    import stoker
    from train import Photos

    if __name__ == "__main__":
        for _ in stoker.DataLoader(stoker.Staged(Photos("photos"), cache="disk", cache_dir="caches"), batch_size=100):
            pass
"""


def write(folder: Path, text: str, name: str = "train.py") -> None:
    (folder / name).write_text(textwrap.dedent(text).lstrip())


def run(folder: Path, *words: str, code: int = 0) -> str:
    """What a command prints, both streams; ``stoker`` and ``python`` are those that run this."""
    mine = {"stoker": [sys.executable, "-m", "stoker"], "python": [sys.executable]}
    env = {**os.environ, "COLUMNS": "80", "HOME": str(folder / "home"), "PYTHONPATH": f"{ROOT / 'src'}:{folder}"}
    env.pop("XDG_CACHE_HOME", None)
    line = [*mine[words[0]], *words[1:]]
    p = subprocess.run(
        line, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S
    )
    if p.returncode != code:
        raise RuntimeError(f"{' '.join(words)}: exit code {p.returncode}\n{p.stdout}")
    lines = [line for line in p.stdout.splitlines() if not line.startswith("stoker: measuring")]  # its progress
    return "\n".join(lines).replace(f"{folder}/", "").rstrip()


def said(folder: Path, *words: str, code: int = 0) -> str:
    return f"$ {' '.join(words)}\n{run(folder, *words, code=code)}"


def make_photos(folder: Path, count: int = PHOTOS) -> None:
    run(folder, "python", str(ROOT / "examples" / "make_photos.py"), "--out", "data", "--count", str(count))


def doctor(folder: Path) -> str:
    write(folder, CLIPS)
    return said(folder, "stoker", "run", "train.py")


def compare(folder: Path) -> str:
    write(folder, CLIPS)
    run(folder, "stoker", "run", "--json", "before.json", "train.py")
    write(folder, CLIPS.replace("batch_size=8)", "batch_size=8, num_workers=2)"))
    run(folder, "stoker", "run", "--json", "after.json", "train.py")
    lines = [f"$ stoker run --json {name}.json train.py" for name in ("before", "after")]
    return "\n".join([*lines, said(folder, "stoker", "compare", "before.json", "after.json")])


def report(folder: Path) -> str:
    write(folder, CLIPS)
    run(folder, "stoker", "run", "--json", "report.json", "train.py")
    found = json.loads((folder / "report.json").read_text())
    values = found["verdict"], found["findings"][0]["cause"], found["loaders"][0]["samples_per_s"]
    asked = "jq '.verdict, .findings[0].cause, .loaders[0].samples_per_s' report.json"
    return "\n".join(["$ stoker run --json report.json train.py", f"$ {asked}", *map(json.dumps, values)])


def money(folder: Path) -> str:
    write(folder, SPECTRA)
    prices = "--gpu-price", "2.10", "--gpus", "8", "--cpu-price", "0.04"
    return said(folder, "stoker", "run", *prices, "train.py")


def bench(folder: Path) -> str:
    make_photos(folder)
    write(folder, PICTURES)
    return said(folder, "stoker", "bench", "train.py:make_loader")


def tune(folder: Path) -> str:
    write(folder, DISK)
    return said(folder, "stoker", "tune", "train.py:make_loader")


def stats(folder: Path) -> str:
    make_photos(folder)
    write(folder, PICTURES)
    first, second = sorted((folder / "data" / "photos").iterdir())[23:25]
    first.write_bytes(first.read_bytes()[:5000])
    second.write_text("no photograph")
    return said(folder, "stoker", "stats", "train.py:photos")


def batch_size(folder: Path) -> str:
    write(folder, DISK)
    return said(folder, "stoker", "batch-size", "train.py:make_loader", code=2)


def split(folder: Path) -> str:
    write(folder, CROPS)
    code = "import stoker; from train import Photos; print(stoker.split(Photos('photos')))"
    return f'>>> print(stoker.split(Photos("photos")))\n{run(folder, "python", "-c", code)}'


def cache(folder: Path) -> str:
    write(folder, CROPS)
    write(folder, USE_CACHE, "use.py")
    run(folder, "python", "use.py")
    return said(folder, "stoker", "cache", "ls", "--dir", "caches")


def _page(name: str, folder: Path, blocks: int) -> str:
    """What the first blocks of a page of docs print."""
    found = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / name).read_text(), re.DOTALL)
    write(folder, "\n".join(found[:blocks]), "page.py")
    return run(folder, "python", "page.py")


def resume(folder: Path) -> str:
    return _page("resume.md", folder, 1)


def killed(folder: Path) -> str:
    example = str(ROOT / "examples" / "resume.py")
    run(folder, "python", example, "--die-after", "15", code=1)
    lines = [f"$ python examples/resume.py {end}" for end in ("--die-after 15", "--workers 1")]
    return "\n".join([*lines, run(folder, "python", example, "--workers", "1")])


def skip(folder: Path) -> str:
    warned = re.findall(r"StokerWarning: .*", _page("faults.md", folder, 1))
    return "\n".join(textwrap.wrap(warned[0], 116))


NAMES: dict[str, Callable[[Path], str]] = {
    each.__name__: each
    for each in (doctor, compare, report, money, bench, tune, stats, batch_size, split, cache, resume, killed, skip)
}


def main(words: list[str]) -> int:
    if len(words) != 1 or words[0] not in NAMES:
        print(f"{__doc__}\nNAME is one of {', '.join(NAMES)}.", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        print(f"```console\n{NAMES[words[0]](Path(folder).resolve())}\n```")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
