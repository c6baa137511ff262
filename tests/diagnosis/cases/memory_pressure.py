"""A mapped dataset of 480 MB in a container of 416: what is dropped for want of memory is read again at once."""

import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

NOT_HERE = 77  # this machine does not allow it
LIMIT, ROWS, WIDTH = 416 << 20, 1920, 256 << 10


@contextlib.contextmanager
def small_container(limit):
    """This process and its children in a memory cgroup of their own, version 1 or 2."""
    base = Path("/sys/fs/cgroup/memory")
    base, file = (base, "memory.limit_in_bytes") if base.exists() else (base.parent, "memory.max")
    here = base / f"planted-{os.getpid()}"
    try:
        here.mkdir()
        (here / file).write_text(str(limit))
        (here / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        sys.exit(NOT_HERE)
    yield
    with contextlib.suppress(OSError):
        (base / "cgroup.procs").write_text(str(os.getpid()))
        here.rmdir()


if __name__ == "__main__":
    import numpy as np
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Mapped(Dataset):
        def __init__(self, path):
            self.rows = np.memmap(path, np.uint8, "r", shape=(ROWS, WIDTH))

        def __len__(self):
            return ROWS

        def __getitem__(self, i):
            return torch.from_numpy(self.rows[i].copy())

    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder, small_container(LIMIT):
        path = Path(folder) / "rows"
        with open(path, "wb") as file:
            for _ in range(ROWS):
                file.write(os.urandom(WIDTH))
        for epoch in range(4):
            for batch in DataLoader(Mapped(path), batch_size=8, shuffle=True, num_workers=2):
                time.sleep(0.002)
