"""A handle opened by the first sample of each worker, left out of pickles, with a reader object of its own."""

import os
import struct
import threading

import numpy as np
import torch
from seen import Seen
from torch.utils.data import DataLoader, Dataset

SIZE = 4 + 256 * 4


class Group:
    """As h5py's: items by name, read when they are asked for."""

    def __init__(self, path):
        self._file = open(path, "rb")
        self._lock = threading.Lock()

    def __getitem__(self, key):
        with self._lock:
            self._file.seek(int(key) * SIZE)
            return Item(self._file.read(SIZE))

    def keys(self):
        return [str(k) for k in range(512)]


class Item:
    def __init__(self, data):
        self._data = data

    def __getitem__(self, where):
        assert where == () or where is Ellipsis
        return np.frombuffer(self._data, "<f4", offset=4)

    @property
    def attrs(self):
        return {"number": struct.unpack_from("<i", self._data)[0]}


class H5Like(Dataset):
    def __init__(self, path):
        self.path, self._h5 = path, None
        self.keys = Group(path).keys()

    @property
    def h5(self):
        if self._h5 is None:
            self._h5 = Group(self.path)
        return self._h5

    def __getstate__(self):
        return {**self.__dict__, "_h5": None}

    def __len__(self):
        return len(self.keys)

    def __getitem__(self, index):
        item = self.h5[self.keys[index]]
        signal = item[()].astype(np.float64)
        for _ in range(30):
            signal = np.convolve(signal, np.ones(5) / 5, mode="same")
        shift = np.random.randint(0, 256)
        return torch.from_numpy(np.roll(signal, shift)), item.attrs["number"], torch.from_numpy(np.sort(signal))


if __name__ == "__main__":
    torch.manual_seed(3)
    np.random.seed(3)
    loader = DataLoader(
        H5Like(os.path.join(os.environ["DATA"], "records.bin")),
        32,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
    )
    seen = Seen()
    for _ in range(4):
        for x, n, ordered in loader:
            seen.add(n, ordered, drawn=x)
        seen.epoch()
    seen.end()
