"""Datasets that fool a cache, as people write them. Each changes something between epochs, or draws in its own way."""

from __future__ import annotations

import abc
import builtins
import collections
import configparser
import contextlib
import ctypes
import dataclasses
import datetime
import decimal
import difflib
import enum
import functools
import gc
import hashlib
import logging
import operator
import os
import pickle
import queue
import random
import secrets
import sqlite3
import struct
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import scipy.special
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data import Dataset, get_worker_info

N = 24
MEDIAN, CUMSUM, RELU = np.median, torch.Tensor.cumsum, torch.nn.ReLU.forward


def assert_as_made(staged: Any, data: Any, epoch: int) -> None:
    """Each sample from the cache is what the dataset makes under the same seed."""
    for i in range(len(data)):
        torch.manual_seed(i)
        cached = staged[i]
        torch.manual_seed(i)
        assert torch.equal(cached, data[i]), (epoch, i)


class Case(Dataset[Any]):
    """A dataset, and what its script does before each epoch."""

    is_random = False  # how often samples change is compared, not their bits
    worker_init_fn: Callable[[int], None] | None = None  # of its loader

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __len__(self) -> int:
        return N

    def between(self, epoch: int) -> None:
        """Before an epoch, in the script."""

    def within(self, batch: int) -> None:
        """After a batch, in the script."""


def slow(i: int, size: int = 16) -> np.ndarray[Any, Any]:
    """An array that takes a tenth of a millisecond to make."""
    x = np.full((size, size), float(i + 1))
    for _ in range(20):
        x = np.sqrt(x + 1.0) * 1.5
    return x


# -- what worker_init_fn sets


class _SetInWorkers(Case):
    """Its script's workers are told the number of the epoch."""

    epoch = 0

    def __init__(self, folder: Path) -> None:
        _SetInWorkers.epoch = 0
        self.gain, self._gain, self._epoch, self.split = 1.0, 1.0, 1.0, 1.0
        self._gains = [1.0] * N

    def between(self, epoch: int) -> None:
        _SetInWorkers.epoch = epoch

    def __getitem__(self, i: int) -> Any:
        return slow(i) * self.gain * self._gain * self._epoch * self._gains[i] * getattr(self, "split", 3.0)


def _workers_dataset() -> Any:
    info = get_worker_info()
    assert info is not None
    return info.dataset


class PublicAttributeInWorkers(_SetInWorkers):
    @staticmethod
    def worker_init_fn(worker: int) -> None:
        _workers_dataset().gain = 1.0 + _SetInWorkers.epoch


class PrivateAttributeInWorkers(_SetInWorkers):
    @staticmethod
    def worker_init_fn(worker: int) -> None:
        _workers_dataset()._gain = 1.0 + _SetInWorkers.epoch


class NameThatACacheHasTooInWorkers(_SetInWorkers):
    @staticmethod
    def worker_init_fn(worker: int) -> None:
        _workers_dataset()._epoch = 1.0 + _SetInWorkers.epoch
        _workers_dataset().split = 2.0 + _SetInWorkers.epoch


class PrivateListInWorkers(_SetInWorkers):
    @staticmethod
    def worker_init_fn(worker: int) -> None:
        _workers_dataset()._gains[3] += _SetInWorkers.epoch


class ThroughVarsInWorkers(_SetInWorkers):
    @staticmethod
    def worker_init_fn(worker: int) -> None:
        vars(_workers_dataset())["gain"] = 1.0 + _SetInWorkers.epoch


class DeletedInWorkers(_SetInWorkers):
    @staticmethod
    def worker_init_fn(worker: int) -> None:
        if _SetInWorkers.epoch >= 2:
            del _workers_dataset().split


# -- state that the loop changes


class LabelsInManyRecords(Case):
    def __init__(self, folder: Path) -> None:
        self.records = [{"label": k % 5, "name": f"r{k}"} for k in range(300)]

    def __getitem__(self, i: int) -> Any:
        return slow(i), self.records[i * 7]["label"]

    def between(self, epoch: int) -> None:
        for record in self.records[::7]:
            record["label"] = (record["label"] + epoch) % 11


@dataclasses.dataclass
class Item:
    path: str
    weight: float = 1.0


class WeightsInDataclasses(Case):
    def __init__(self, folder: Path) -> None:
        self.items = [Item(f"{k}.png") for k in range(300)]

    def __getitem__(self, i: int) -> Any:
        return slow(i) * self.items[i * 9].weight

    def between(self, epoch: int) -> None:
        self.items[27].weight = float(epoch)


class SwitchedOff(Case):
    def __init__(self, folder: Path) -> None:
        self.overlay: Any = np.ones((16, 16))

    def __getitem__(self, i: int) -> Any:
        x = slow(i)
        return x if self.overlay is None else x + self.overlay

    def between(self, epoch: int) -> None:
        if epoch == 2:
            self.overlay = None


class MinusOneToMinusTwo(Case):
    """hash(-1) == hash(-2)"""

    def __init__(self, folder: Path) -> None:
        self.labels = [-1] * N

    def __getitem__(self, i: int) -> Any:
        return slow(i), self.labels[i]

    def between(self, epoch: int) -> None:
        self.labels[3] = -2 if epoch >= 2 else -1


class SettingsOfAClass(Case):
    class Meta:
        size = 16

    def __init__(self, folder: Path) -> None:
        type(self).Meta.size = 16

    def __getitem__(self, i: int) -> Any:
        return slow(i, self.Meta.size).mean()

    def between(self, epoch: int) -> None:
        self.Meta.size = 16 + 4 * epoch


CFG = {"size": 16}


def load(i: int, cfg: dict[str, int] = CFG) -> Any:
    return slow(i, cfg["size"]).mean()


class DefaultArgument(Case):
    def __init__(self, folder: Path) -> None:
        CFG["size"] = 16

    def __getitem__(self, i: int) -> Any:
        return load(i)

    def between(self, epoch: int) -> None:
        CFG["size"] = 16 + 4 * epoch


SCALE = 1.0


class GlobalBySubscript(Case):
    def __init__(self, folder: Path) -> None:
        self.between(0)

    def __getitem__(self, i: int) -> Any:
        return slow(i) * globals()["SCALE"]

    def between(self, epoch: int) -> None:
        global SCALE
        SCALE = 1.0 + epoch


class Environment(Case):
    def __init__(self, folder: Path) -> None:
        self.between(0)

    def __getitem__(self, i: int) -> Any:
        return slow(i) * int(os.environ["EXACT_SCALE"])

    def between(self, epoch: int) -> None:
        os.environ["EXACT_SCALE"] = str(1 + epoch)


class ConfigFile(Case):
    def __init__(self, folder: Path) -> None:
        self.cfg = configparser.ConfigParser()
        self.cfg.read_dict({"data": {"scale": "1"}})

    def __getitem__(self, i: int) -> Any:
        return slow(i) * self.cfg.getint("data", "scale")

    def between(self, epoch: int) -> None:
        self.cfg.set("data", "scale", str(1 + epoch))


class ChainOfMaps(Case):
    def __init__(self, folder: Path) -> None:
        self.cfg = collections.ChainMap({}, {"scale": 1})

    def __getitem__(self, i: int) -> Any:
        return slow(i) * self.cfg["scale"]

    def between(self, epoch: int) -> None:
        self.cfg["scale"] = 1 + epoch


class BankOfArrays(Case):
    def __init__(self, folder: Path) -> None:
        self.bank = collections.deque([np.zeros((16, 16))] * 4, maxlen=4)

    def __getitem__(self, i: int) -> Any:
        return slow(i) + self.bank[i % 4]

    def between(self, epoch: int) -> None:
        self.bank.append(np.full((16, 16), float(epoch)))


class TensorsInAList(Case):
    def __init__(self, folder: Path) -> None:
        self.embeddings = [torch.zeros(4) for _ in range(300)]

    def __getitem__(self, i: int) -> Any:
        return torch.from_numpy(slow(i))[0, :4] + self.embeddings[i * 5]

    def between(self, epoch: int) -> None:
        self.embeddings[25].data.copy_(torch.full((4,), float(epoch)))  # raises no version


class BytesOfFlags(Case):
    def __init__(self, folder: Path) -> None:
        self.flags = bytearray(N)

    def __getitem__(self, i: int) -> Any:
        return slow(i) * (1 + self.flags[i])

    def between(self, epoch: int) -> None:
        self.flags[5] = epoch


class Slots:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class HelperWithSlots(Case):
    def __init__(self, folder: Path) -> None:
        self.helper = Slots()

    def __getitem__(self, i: int) -> Any:
        return slow(i) * self.helper.scale

    def between(self, epoch: int) -> None:
        self.helper.scale = 1.0 + epoch


class HelpersInADictionary(Case):
    def __init__(self, folder: Path) -> None:
        self.helpers = {"a": Slots(), "b": Slots()}

    def __getitem__(self, i: int) -> Any:
        return slow(i) * self.helpers["b"].scale

    def between(self, epoch: int) -> None:
        self.helpers["b"].scale = 1.0 + epoch


class Attribute:
    """A descriptor whose value lies in itself."""

    def __init__(self) -> None:
        self.value = 1.0

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self.value

    def __set__(self, owner: Any, value: float) -> None:
        self.value = value


class BehindADescriptor(Case):
    scale = Attribute()

    def __init__(self, folder: Path) -> None:
        self.scale = 1.0

    def __getitem__(self, i: int) -> Any:
        return slow(i) * self.scale

    def between(self, epoch: int) -> None:
        self.scale = 1.0 + epoch


class MethodReplaced(Case):
    def __init__(self, folder: Path) -> None:
        self.transform: Callable[[Any], Any] = functools.partial(np.multiply, 1.0)

    def __getitem__(self, i: int) -> Any:
        return self.transform(slow(i))

    def between(self, epoch: int) -> None:
        self.transform = functools.partial(np.multiply, 1.0 + epoch)


# -- files


class _Files(Case):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.paths = [str(folder / "x" / f"{i}.npy") for i in range(N)]
        for name in ("x", "y"):
            (folder / name).mkdir(exist_ok=True)
        for i, path in enumerate(self.paths):
            np.save(path, slow(i))

    def stamp(self, path: Path | str, epoch: int) -> None:
        """Two writes may fall into one tick of the file system's clock."""
        os.utime(path, ns=(10**18 + epoch, 10**18 + epoch))


class FilesWrittenAnew(_Files):
    def __getitem__(self, i: int) -> Any:
        return np.load(self.paths[i]).mean()

    def between(self, epoch: int) -> None:
        np.save(self.paths[21], slow(epoch))
        self.stamp(self.paths[21], epoch)


class FilesBesideThoseNamed(_Files):
    def __getitem__(self, i: int) -> Any:
        path = self.paths[i].replace("/x/", "/y/").replace(".npy", ".txt")
        return np.load(self.paths[i]) * (float(Path(path).read_text()) if os.path.exists(path) else 1.0)

    def between(self, epoch: int) -> None:
        path = Path(self.folder) / "y" / f"{3 + epoch}.txt"
        path.write_text(str(epoch))


# -- what is another each time


class FromTheWorkersSeed(Case):
    is_random = True

    def __getitem__(self, i: int) -> Any:
        info = get_worker_info()
        rng = np.random.default_rng((0 if info is None else info.seed) + i)
        return slow(i) * (1 + rng.integers(1 << 30))


class _Rare(Case):
    """One class in six is augmented with a generator that nobody has seeded."""

    is_random = True

    def __getitem__(self, i: int) -> Any:
        x = slow(i)
        if i % 6 == 4:
            x = self.augment(x)
        return x

    def augment(self, x: Any) -> Any:
        raise NotImplementedError


class RareFreshGenerator(_Rare):
    def augment(self, x: Any) -> Any:
        return x + np.random.default_rng().random()


class RareSecrets(_Rare):
    def augment(self, x: Any) -> Any:
        return x + secrets.randbelow(1 << 30)


class SeedOfTheRecord(Case):
    """Some records ask for another augmentation each time. No branch tells."""

    is_random = True

    def __init__(self, folder: Path) -> None:
        self.seeds = [None if i % 6 == 4 else i for i in range(N)]

    def __getitem__(self, i: int) -> Any:
        return slow(i) * (1 + np.random.default_rng(self.seeds[i]).random())


class MakerOfTheRecord(Case):
    is_random = True

    def __init__(self, folder: Path) -> None:
        self.makers: list[Callable[[int], Any]] = [secrets.randbelow if i % 6 == 4 else float for i in range(N)]

    def __getitem__(self, i: int) -> Any:
        return slow(i) + self.makers[i](1 << 30)


class MakerInALocal(MakerOfTheRecord):
    def __getitem__(self, i: int) -> Any:
        make = self.makers[i]
        return slow(i) + make(1 << 30)


class MakerIsAPartial(MakerOfTheRecord):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.makers = [functools.partial(make) for make in self.makers]


fresh = np.random.default_rng


class SeederOfAnotherName(SeedOfTheRecord):
    def __getitem__(self, i: int) -> Any:
        return slow(i) * (1 + fresh(self.seeds[i]).random())


class RareWhileOthersWait(SeedOfTheRecord):
    """Workers read such samples ahead with threads."""

    def __getitem__(self, i: int) -> Any:
        time.sleep(0.004)
        return slow(i) * (1 + np.random.default_rng(self.seeds[i]).random())


class OwnCursor(Case):
    """Each sample takes the next row of a query that is under way."""

    def __init__(self, folder: Path) -> None:
        table = sqlite3.connect(folder / "rows.db")
        table.execute("create table labels (label real)")
        table.executemany("insert into labels values (?)", [(i * i,) for i in range(10 * N)])
        table.commit()
        self.rows = table.execute("select label from labels")

    def __getitem__(self, i: int) -> Any:
        return slow(i) + (self.rows.fetchone() or (-1.0,))[0]


class SuppressedMostly(Case):
    """What follows an error that is suppressed runs rarely."""

    is_random = True

    def __init__(self, folder: Path) -> None:
        self.table = {i: 1.0 for i in range(N) if i % 6 == 4}

    def __getitem__(self, i: int) -> Any:
        x = slow(i)
        with contextlib.suppress(KeyError):
            x = x + self.table[i]
            x = x * (1 + np.random.default_rng().random())
        return x


class TriedMostly(SuppressedMostly):
    def __getitem__(self, i: int) -> Any:
        x = slow(i)
        try:
            x = x + self.table[i]
            x = x * (1 + np.random.default_rng().random())
        except KeyError:
            x = x * 2
        return x


class ShuffledRarely(Case):
    def __init__(self, folder: Path) -> None:
        self.queue = np.arange(N)

    def __getitem__(self, i: int) -> Any:
        if i == 13:
            np.random.shuffle(self.queue)
        return slow(i) * self.queue[i]


class AddedInto(Case):
    def __init__(self, folder: Path) -> None:
        self.total, self.more = np.zeros(1), np.arange(N) == 13

    def __getitem__(self, i: int) -> Any:
        np.add(self.total, self.more[i], out=self.total)
        return slow(i) + self.total


class OwnConnection(Case):
    """The script changes a table through the dataset's connection, and commits nothing."""

    def __init__(self, folder: Path) -> None:
        self.table = sqlite3.connect(folder / "labels.db")
        self.table.execute("create table labels (i integer primary key, label real)")
        self.table.executemany("insert into labels values (?, 0)", [(i,) for i in range(N)])
        self.table.commit()

    def between(self, epoch: int) -> None:
        if epoch:
            self.table.execute("update labels set label = ? where i % 6 = 4", (epoch,))

    def __getitem__(self, i: int) -> Any:
        return slow(i) + self.table.execute("select label from labels where i = ?", (i,)).fetchone()[0]


writers: list[sqlite3.Connection] = []  # a log is removed with the last connection


class WriteAheadLog(Case):
    """The script changes a table of which each sample opens the file. The changes are in another file."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ahead.db"
        writers[:] = [sqlite3.connect(self.path)]
        writers[0].execute("pragma journal_mode=wal")
        writers[0].execute("create table labels (i integer primary key, label real)")
        writers[0].executemany("insert into labels values (?, 0)", [(i,) for i in range(N)])
        writers[0].commit()

    def between(self, epoch: int) -> None:
        if epoch:
            writers[0].execute("update labels set label = ? where i % 6 = 4", (epoch,))
            writers[0].commit()

    def __getitem__(self, i: int) -> Any:
        x = slow(i)
        if i % 6 == 4:
            table = sqlite3.connect(self.path)
            x = x + table.execute("select label from labels where i = ?", (i,)).fetchone()[0]
            table.close()
        return x


class RareClock(_Rare):
    def augment(self, x: Any) -> Any:
        return x + np.random.RandomState(time.time_ns() % (1 << 32)).rand()


class RareFreshRandom(_Rare):
    def augment(self, x: Any) -> Any:
        return x + random.Random().random()


class SeldomUrandom(Case):
    is_random = True

    def __getitem__(self, i: int) -> Any:
        return slow(i) * (-1 if os.urandom(1)[0] < 40 else 1)


# -- state within a sample


class Flip:
    def __init__(self) -> None:
        self.do = False

    def randomize(self) -> None:
        self.do = random.random() < 0.5

    def __call__(self, x: Any) -> Any:
        return x[::-1].copy() if self.do else x


class DrawnOnAHelper(Case):
    def __init__(self, folder: Path) -> None:
        self.flip = Flip()

    def __getitem__(self, i: int) -> Any:
        self.flip.randomize()
        return self.flip(np.cumsum(slow(i), 0)), self.flip(np.cumsum(slow(i + 1), 0))


class FlagReadByTheLoader(Case):
    def load(self, j: int) -> Any:
        x = slow(j)
        return x.mean() if self.gray else x.sum()

    def __getitem__(self, i: int) -> Any:
        self.gray = random.random() < 0.5
        return self.load(random.randrange(N))


class BankOfWhatWasLoaded(Case):
    def __init__(self, folder: Path) -> None:
        self.bank: list[Any] = []

    def __getitem__(self, i: int) -> Any:
        x = slow(i)
        if i % 6 == 4:
            self.bank.append(x)
        return x + (self.bank[-1] if self.bank else 0.0)


class RetriesWithAnother(Case):
    def __getitem__(self, i: int) -> Any:
        if i % 7 == 3:
            return self[random.randrange(N)]
        return slow(i)


class TypeOfTheIndex(Case):
    def __getitem__(self, i: int) -> Any:
        return slow(int(i)), type(i).__name__ == "int"


# -- what is changed seldom, by a helper, or kept by lru_cache


class _Counter:
    def __init__(self) -> None:
        self.n = 0

    def note(self) -> None:
        self.n += 1


class _Counting(Case):
    def __init__(self, folder: Path) -> None:
        self.counter = _Counter()


class SeldomCountedFirst(_Counting):
    """By a method that no sample of the trial calls; the random part reads it."""

    def __getitem__(self, i: int) -> Any:
        if i % 7 == 4:
            self.counter.note()
        x = slow(i)
        return torch.from_numpy(x) + torch.rand(16, 16) * (1 + self.counter.n)


class SeldomCountedLast(_Counting):
    def __getitem__(self, i: int) -> Any:
        x = slow(i)
        noise = torch.rand(16, 16)
        if i % 7 == 4:
            self.counter.note()
        return torch.from_numpy(x) + noise * (1 + self.counter.n)


class SeldomCountedAndRead(_Counting):
    """No part of it is random."""

    def __getitem__(self, i: int) -> Any:
        if i % 7 == 4:
            self.counter.note()
        return slow(i) + self.counter.n


class DifficultyOfTheStep(Case):
    """Workers see in the next epoch what the loop sets in this one."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.difficulty, self.step = 0.0, 0

    def within(self, batch: int) -> None:
        self.step += 1
        self.difficulty = self.step / 10

    def __getitem__(self, i: int) -> Any:
        x = slow(i)
        return torch.from_numpy(x) + torch.arange(16.0) * self.difficulty


def _make_tick() -> Callable[[], bool]:
    n = 0

    def tick() -> bool:
        nonlocal n
        n += 1
        return n % 10 == 9

    return tick


tick = _make_tick()


class CountedInAClosure(Case):
    """By a global function that another one has made."""

    def __init__(self, folder: Path) -> None:
        global tick
        tick = _make_tick()

    def __getitem__(self, i: int) -> Any:
        x = slow(i)
        return 1 - x if tick() else x


@functools.lru_cache
def chosen_shift(label: int) -> int:
    return random.randrange(8)


class DrawnOnceForEachClass(Case):
    """In each worker of each epoch."""

    is_random = True

    def __getitem__(self, i: int) -> Any:
        return np.roll(slow(i) * np.arange(16.0)[:, None], chosen_shift(i % 3), 0)


class KeptByLruCacheAndChanged(Case):
    @functools.cache  # noqa: B019
    def load(self, i: int) -> Any:
        return slow(i)

    def __getitem__(self, i: int) -> Any:
        x = self.load(i)
        x += 0.01
        return x.copy()


class OwnCacheSeldomChanged(Case):
    """A cache of the dataset's own, an item of which is changed in place."""

    def __init__(self, folder: Path) -> None:
        self.kept: dict[int, Any] = {}

    def __getitem__(self, i: int) -> Any:
        if i not in self.kept:
            self.kept[i] = torch.from_numpy(slow(i))
        x = self.kept[i]
        if random.random() < 0.1:
            x.mul_(0.5)
        return x.clone()


# -- what classes, libraries, and the interpreter hold


class Policy(enum.Enum):
    SOFT = 1

    @property
    def scale(self) -> float:
        return float(self._scales[self.name])  # type: ignore[attr-defined]


Policy._scales = {"SOFT": 1.0}  # type: ignore[attr-defined]


class MemberOfAnEnum(Case):
    """Its class holds what changes."""

    def __init__(self, folder: Path) -> None:
        self.policy = next(iter(Policy))
        self.between(0)

    def __getitem__(self, i: int) -> Any:
        return slow(i) * self.policy.scale

    def between(self, epoch: int) -> None:
        self.policy._scales["SOFT"] = 1.0 + epoch  # type: ignore[attr-defined]


class SaysItIsEmpty(list[float]):
    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Any:
        return iter(())


class SaysItHasNothing(dict[str, float]):
    items = keys = values = lambda self: ()  # type: ignore[assignment]

    def __iter__(self) -> Any:
        return iter(())

    def __reduce__(self) -> Any:
        return SaysItHasNothing, ()


class ContainersThatLie(Case):
    def __init__(self, folder: Path) -> None:
        self.weights, self.cfg = SaysItIsEmpty([1.0] * N), SaysItHasNothing(scale=1.0)

    def __getitem__(self, i: int) -> Any:
        return slow(i) * self.weights[i] * self.cfg["scale"]

    def between(self, epoch: int) -> None:
        if epoch == 1:
            self.weights[3] = 2.0
        if epoch == 2:
            self.cfg["scale"] = 3.0


class PrintOptions(Case):
    def __init__(self, folder: Path) -> None:
        self.between(0)

    def __getitem__(self, i: int) -> Any:
        return slow(i), len(str(np.sqrt(np.arange(3.0)))), len(str(decimal.Decimal(1) / 3))

    def between(self, epoch: int) -> None:
        np.set_printoptions(precision=8 - 2 * (epoch % 2))
        decimal.getcontext().prec = 28 - 2 * (epoch // 2)


class ValueOfALibrary(Case):
    def __init__(self, folder: Path) -> None:
        self.between(0)

    def __getitem__(self, i: int) -> Any:
        return slow(i) * (1 + sys.dont_write_bytecode)

    def between(self, epoch: int) -> None:
        sys.dont_write_bytecode = bool(epoch % 2)


class AmongTheBuiltins(Case):
    def __init__(self, folder: Path) -> None:
        self.between(0)

    def __getitem__(self, i: int) -> Any:
        return slow(i) * exact_scale()  # type: ignore[name-defined]  # noqa: F821

    def between(self, epoch: int) -> None:
        builtins.exact_scale = (lambda: 1.0) if epoch < 2 else (lambda: 2.0)  # type: ignore[attr-defined]


class Doubles(abc.ABC):  # noqa: B024
    pass


class RegisteredLater(Case):
    def __init__(self, folder: Path) -> None:
        self.helper = type("Slots", (Slots,), {"__module__": __name__})()

    def __getitem__(self, i: int) -> Any:
        return slow(i) * (2.0 if isinstance(self.helper, Doubles) else 1.0)

    def between(self, epoch: int) -> None:
        if epoch == 2:
            Doubles.register(type(self.helper))


class HashedFurther(Case):
    def __init__(self, folder: Path) -> None:
        self.hash = hashlib.md5(b"x")

    def __getitem__(self, i: int) -> Any:
        return slow(i) * self.hash.digest()[0]

    def between(self, epoch: int) -> None:
        if epoch == 2:
            self.hash.update(b"more")


class AnotherUnderItsName(Case):
    def __init__(self, folder: Path) -> None:
        np.median = MEDIAN

    def __getitem__(self, i: int) -> Any:
        return slow(i) * float(np.median([1.0, 2.0, 9.0]))

    def between(self, epoch: int) -> None:
        if epoch == 2:
            np.median = np.mean


EPOCH = [0]


def told_by_a_frame() -> float:
    return float(1 + sys._getframe().f_globals["EPOCH"][0])


class ToldByAFrame(Case):
    def __init__(self, folder: Path) -> None:
        EPOCH[0] = 0

    def __getitem__(self, i: int) -> Any:
        return slow(i) * told_by_a_frame()

    def between(self, epoch: int) -> None:
        EPOCH[0] = epoch // 2


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made * 2 if func is torch.cumsum else made


class InAModeOfTorch(Case):
    mode = Doubling()

    def __init__(self, folder: Path) -> None:
        pass

    def __getitem__(self, i: int) -> Any:
        return torch.cumsum(torch.as_tensor(slow(i)), 0)

    def between(self, epoch: int) -> None:
        if epoch == 2:
            self.mode.__enter__()
        if epoch == 3:
            self.mode.__exit__(None, None, None)


class AttributeOfALogger(Case):
    def __init__(self, folder: Path) -> None:
        self.log: Any = logging.getLogger("exact.attribute")
        self.log.scale = 1.0

    def __getitem__(self, i: int) -> Any:
        return slow(i) * self.log.scale

    def between(self, epoch: int) -> None:
        if epoch == 2:
            self.log.scale = 2.0


class AnotherUfunc(Case):
    def __init__(self, folder: Path) -> None:
        self.op = scipy.special.j0

    def __getitem__(self, i: int) -> Any:
        return slow(i) * self.op(1.5)

    def between(self, epoch: int) -> None:
        if epoch == 2:
            self.op = scipy.special.j1


class MadeReadOnly(Case):
    def __init__(self, folder: Path) -> None:
        self.table = np.ones(3)

    def __getitem__(self, i: int) -> Any:
        return slow(i) * (2.0 if self.table.flags.writeable else 1.0)

    def between(self, epoch: int) -> None:
        if epoch == 2:
            self.table.setflags(write=False)


class MethodOfTensorsReplaced(Case):
    def __init__(self, folder: Path) -> None:
        torch.Tensor.cumsum = CUMSUM  # type: ignore[method-assign]

    def __getitem__(self, i: int) -> Any:
        return torch.as_tensor(slow(i)).cumsum(0)

    def between(self, epoch: int) -> None:
        if epoch == 2:
            torch.Tensor.cumsum = lambda self, dim: CUMSUM(self, dim) + 1  # type: ignore[method-assign, assignment]
        if epoch == 3:
            torch.Tensor.cumsum = CUMSUM  # type: ignore[method-assign]


class ForwardOfModulesReplaced(Case):
    def __init__(self, folder: Path) -> None:
        self.module = torch.nn.ReLU()
        torch.nn.ReLU.forward = RELU  # type: ignore[method-assign]

    def __getitem__(self, i: int) -> Any:
        return self.module(torch.as_tensor(slow(i)))

    def between(self, epoch: int) -> None:
        if epoch == 2:
            torch.nn.ReLU.forward = lambda self, x: x + 1  # type: ignore[method-assign]
        if epoch == 3:
            torch.nn.ReLU.forward = RELU  # type: ignore[method-assign]


class FileInMemory(Case):
    def __init__(self, folder: Path) -> None:
        self.write("1.0")

    def write(self, text: str) -> None:
        with fsspec.open("memory://exact.txt", "w") as file:
            file.write(text)

    def __getitem__(self, i: int) -> Any:
        with fsspec.open("memory://exact.txt", "r") as file:
            return slow(i) * float(file.read())

    def between(self, epoch: int) -> None:
        if epoch == 2:
            self.write("2.0")


class RareFileInAFolderOfItsOwn(Case):
    def __init__(self, folder: Path) -> None:
        self.parts = folder.parts
        (folder / "aux1").mkdir()
        self.between(0)

    def __getitem__(self, i: int) -> Any:
        if i % 12 == 7:
            with open(os.path.join(*self.parts, "aux" + str(1), f"{i}.msk")) as file:
                return slow(i) * float(file.read())
        return slow(i)

    def between(self, epoch: int) -> None:
        for i in (7, 19):
            Path(*self.parts, "aux1", f"{i}.msk").write_text(f"{1 + epoch // 2}")


class DeeperThanAllowed(Case):
    def __init__(self, folder: Path) -> None:
        sys.setrecursionlimit(1000)

    def depth(self, n: int) -> int:
        return 1 + self.depth(n - 1) if n else 0

    def __getitem__(self, i: int) -> Any:
        try:
            return slow(i) * self.depth(1100)
        except RecursionError:
            return slow(i)

    def between(self, epoch: int) -> None:
        if epoch == 2:
            sys.setrecursionlimit(2000)


COUNTER = ctypes.c_double(0.0)


class CountedByNativeCodeAtTimes(Case):
    def __init__(self, folder: Path) -> None:
        COUNTER.value = 0.0
        self.address = ctypes.addressof(COUNTER)

    def __getitem__(self, i: int) -> Any:
        if i in (5, 7, 9, 11, 17, 19):
            ctypes.memmove(
                self.address, struct.pack("d", struct.unpack("d", ctypes.string_at(self.address, 8))[0] + 1), 8
            )
            return slow(i) * struct.unpack("d", ctypes.string_at(self.address, 8))[0]
        return slow(i)


class RegisteredInAnothersPlace(Case):
    """Two classes of the same name: the first is deleted when the second is registered."""

    held: ClassVar[list[type]] = []

    def __init__(self, folder: Path) -> None:
        self.helper = type("Slots", (Slots,), {"__module__": __name__})()
        self.held[:] = [type("Slots", (Slots,), {"__module__": __name__})]
        gc.collect()
        Doubles.register(self.held[0])

    def __getitem__(self, i: int) -> Any:
        return slow(i) * (2.0 if isinstance(self.helper, Doubles) else 1.0)

    def between(self, epoch: int) -> None:
        if epoch == 2:
            self.held.clear()
            gc.collect()
            Doubles.register(type(self.helper))


class AnotherOfItsName(Case):
    def __init__(self, folder: Path) -> None:
        self.kind = type("Slots", (Slots,), {"__module__": __name__})
        self.helper = self.kind()

    def __getitem__(self, i: int) -> Any:
        return slow(i) * (2.0 if isinstance(self.helper, self.kind) else 1.0)

    def between(self, epoch: int) -> None:
        if epoch == 2:
            self.kind = type("Slots", (Slots,), {"__module__": __name__})


class OfAnotherOfItsName(Case):
    def __init__(self, folder: Path) -> None:
        self.helpers = [type("Slots", (Slots,), {"__module__": __name__})() for _ in range(2)]

    def __getitem__(self, i: int) -> Any:
        return slow(i) * (2.0 if type(self.helpers[0]) is type(self.helpers[1]) else 1.0)

    def between(self, epoch: int) -> None:
        if epoch == 2:
            self.helpers[1] = type(self.helpers[0])()


class Sums:
    def __init__(self) -> None:
        self.parts = [1.0]

    @functools.cached_property
    def total(self) -> float:
        return sum(self.parts)


class SetOnceInEachProcess(Case):
    """Its function runs for the first sample of each worker only."""

    def __init__(self, folder: Path) -> None:
        self.sums = Sums()

    def __getitem__(self, i: int) -> Any:
        return slow(i) * self.sums.total

    def between(self, epoch: int) -> None:
        self.sums.parts.append(1.0)


class MadeByTheScript(Case):
    """A module without a file."""

    def __init__(self, folder: Path) -> None:
        sys.modules["exact_made"] = types.ModuleType("exact_made")
        self.between(0)

    def __getitem__(self, i: int) -> Any:
        import exact_made  # type: ignore[import-not-found]

        return slow(i) * exact_made.SCALE

    def between(self, epoch: int) -> None:
        sys.modules["exact_made"].SCALE = 1.0 + epoch  # type: ignore[attr-defined]


class Pickled:
    scale = 1.0


PICKLED = pickle.dumps(Pickled())


class UnpickledClass(Case):
    """No code names the class."""

    def __init__(self, folder: Path) -> None:
        self.between(0)

    def __getitem__(self, i: int) -> Any:
        return slow(i) * pickle.loads(PICKLED).scale

    def between(self, epoch: int) -> None:
        type(pickle.loads(PICKLED)).scale = 1.0 + epoch


class LinksToNothing(_Files):
    def __getitem__(self, i: int) -> Any:
        link = os.path.join(self.folder, "y", f"{i}")
        return slow(i) * int(os.readlink(link) if os.path.islink(link) else 1)

    def between(self, epoch: int) -> None:
        link = Path(self.folder) / "y" / "3"
        link.unlink(missing_ok=True)
        link.symlink_to(str(2 + epoch))


class FileWithoutAName(Case):
    def __init__(self, folder: Path) -> None:
        self.number = os.memfd_create("exact")
        os.write(self.number, bytes(N))

    def __getitem__(self, i: int) -> Any:
        return slow(i) * (1 + os.pread(self.number, 1, i)[0])

    def between(self, epoch: int) -> None:
        os.pwrite(self.number, bytes([epoch]), 3)


class ItemsOfAComprehension(Case):
    """One sample in six has items, which draw."""

    is_random = True

    def __getitem__(self, i: int) -> Any:
        return slow(i) + sum(secrets.randbelow(1 << 30) for _ in range(int(i % 6 == 4)))


class LaterInAComparison(Case):
    """One sample in three comes to the end of the comparison."""

    is_random = True

    def __getitem__(self, i: int) -> Any:
        return slow(i) * (-1 if 0 < i % 3 < 2 < secrets.randbelow(6) else 1)


class BatchAsAWhole(Case):
    def __getitem__(self, i: int) -> Any:
        return slow(i)

    def __getitems__(self, indices: list[int]) -> Any:
        return [slow(i) + min(indices) for i in indices]


class OfTwoInABatch(Case):
    """Two samples are others where they meet in a batch."""

    def __getitem__(self, i: int) -> Any:
        return slow(i)

    def __getitems__(self, indices: list[int]) -> Any:
        return [slow(i) + (3 if {7, 9} <= set(indices) else 0) for i in indices]


class _Remembered(Case):
    """A library's object keeps what the random part of a sample gave it. One sample in six reads it."""

    def __init__(self, folder: Path) -> None:
        self.matcher = difflib.SequenceMatcher(None, "", "abc")

    def __getitem__(self, i: int) -> Any:
        x = slow(i)
        if i % 6 == 4:
            x = x + self.last()
        drawn = int(torch.randint(1, 9, ()))
        self.matcher.set_seq1("a" * drawn)
        return x + drawn

    def last(self) -> float:
        raise NotImplementedError


class RememberedByALibrary(_Remembered):
    def last(self) -> float:
        return len(self.matcher.a)


class RememberedAndReadByALibrary(_Remembered):
    def last(self) -> float:
        return self.matcher.ratio()


class RememberedAmongItsAttributes(_Remembered):
    def last(self) -> float:
        return len(vars(self.matcher)["".join("a")])


class RememberedOrElse(_Remembered):
    def last(self) -> float:
        try:
            return float(len(self.matcher.a))
        except TypeError:
            return 0.5


class _KeptByALibrary(Case):
    def __init__(self, folder: Path) -> None:
        self.matcher = difflib.SequenceMatcher(None, "", "abc")

    def seldom(self, i: int) -> bool:
        return i % 6 == 4


class HandedOverByALibrary(_KeptByALibrary):
    """The random part reads what the deterministic one gave to a library's object."""

    def __getitem__(self, i: int) -> Any:
        x = slow(i)
        self.matcher.set_seq1("a" * (i % 5))
        return x + int(torch.randint(1, 9, ())) + len(self.matcher.a)


class SeldomHandedOverByALibrary(_KeptByALibrary):
    def __getitem__(self, i: int) -> Any:
        x = slow(i)
        if self.seldom(i):
            self.matcher.set_seq1("a" * (i % 5))
        return x + int(torch.randint(1, 9, ())) + len(self.matcher.a)


class SeldomHandedOverAndSeldomRead(_KeptByALibrary):
    def __getitem__(self, i: int) -> Any:
        x = slow(i)
        if self.seldom(i):
            self.matcher.set_seq1("a" * (i % 5))
        drawn = int(torch.randint(1, 9, ()))
        return x + (drawn if drawn < 6 else len(self.matcher.a))


class Matcher(difflib.SequenceMatcher[str]):
    pass


class HandedOverByABaseClass(HandedOverByALibrary):
    def __init__(self, folder: Path) -> None:
        self.matcher = Matcher(None, "", "abc")


class SeldomHandedOverByABaseClass(SeldomHandedOverByALibrary):
    def __init__(self, folder: Path) -> None:
        self.matcher = Matcher(None, "", "abc")


class RememberedByABaseClass(RememberedByALibrary):
    def __init__(self, folder: Path) -> None:
        self.matcher = Matcher(None, "", "abc")


class HandedOverUnderAnotherName(_KeptByALibrary):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.others = [self.matcher]

    def __getitem__(self, i: int) -> Any:
        x = slow(i)
        self.matcher.set_seq1("a" * (i % 5))
        return x + int(torch.randint(1, 9, ())) + len(self.others[0].a)


SHARED = difflib.SequenceMatcher(None, "", "abc")


class SeldomHandedOverByAGlobal(_KeptByALibrary):
    def __init__(self, folder: Path) -> None:
        SHARED.set_seq1("")

    def __getitem__(self, i: int) -> Any:
        x = slow(i)
        if self.seldom(i):
            SHARED.set_seq1("a" * (i % 5))
        return x + int(torch.randint(1, 9, ())) + len(SHARED.a)


class SeldomReadByALibrary(_KeptByALibrary):
    def __getitem__(self, i: int) -> Any:
        x = slow(i) + self.matcher.ratio() if self.seldom(i) else slow(i)
        return x + int(torch.randint(1, 9, ()))

    def between(self, epoch: int) -> None:
        self.matcher.set_seq1("abc"[: epoch % 3 + 1])


class _InAQueue(_KeptByALibrary):
    def __init__(self, folder: Path) -> None:
        self.queue: Any = queue.Queue()


class LengthOfAQueue(_InAQueue):
    def __getitem__(self, i: int) -> Any:
        x = slow(i) + self.queue.qsize() if self.seldom(i) else slow(i)
        return x + int(torch.randint(1, 9, ()))

    def between(self, epoch: int) -> None:
        self.queue.put(epoch)


class QueueThatGrows(_InAQueue):
    def __getitem__(self, i: int) -> Any:
        x = slow(i) + self.queue.qsize() if self.seldom(i) else slow(i)
        drawn = int(torch.randint(1, 9, ()))
        self.queue.put(drawn)
        return x + drawn


class StatisticsOfAModule(_KeptByALibrary):
    def __init__(self, folder: Path) -> None:
        self.norm = torch.nn.BatchNorm1d(16, momentum=0.5)

    def __getitem__(self, i: int) -> Any:
        x = torch.from_numpy(slow(i)).float()
        x = x + self.norm.running_mean if self.seldom(i) else x
        y = x * torch.rand(())
        self.norm(y)
        return (x + y).detach()


class SettingOfALibrary(_KeptByALibrary):
    def __init__(self, folder: Path) -> None:
        np.set_printoptions(precision=8)

    def __getitem__(self, i: int) -> Any:
        x = slow(i) + np.get_printoptions()["precision"] if self.seldom(i) else slow(i)
        drawn = int(torch.randint(1, 9, ()))
        np.set_printoptions(precision=drawn)
        return x + drawn


class EnvironmentOfTheLastSample(_KeptByALibrary):
    def __init__(self, folder: Path) -> None:
        os.environ["EXACT_SCALE"] = "1"

    def __getitem__(self, i: int) -> Any:
        x = slow(i) + float(os.environ["EXACT_SCALE"]) if self.seldom(i) else slow(i)
        drawn = int(torch.randint(1, 9, ()))
        os.environ["EXACT_SCALE"] = str(drawn)
        return x + drawn


class OwnCacheOfTheScript(Case):
    """Without workers, what the dataset stored itself outlives a change."""

    def __init__(self, folder: Path) -> None:
        self.kept: dict[int, Any] = {}
        self.gain = 1.0

    def between(self, epoch: int) -> None:
        self.gain = epoch + 1.0

    def __getitem__(self, i: int) -> Any:
        if i not in self.kept:
            self.kept[i] = slow(i) * self.gain
        return self.kept[i]


# -- settings of the process


class _Setting(Case):
    """The script changes a setting before each epoch."""

    values: tuple[Any, ...] = (False, True)

    def __init__(self, folder: Path) -> None:
        self.set(self.values[0])

    def set(self, value: Any) -> None:
        raise NotImplementedError

    def between(self, epoch: int) -> None:
        self.set(self.values[epoch % 2])


class AutocastAroundTheLoop(_Setting):
    def set(self, value: Any) -> None:
        torch.set_autocast_enabled("cpu", value)

    def __getitem__(self, i: int) -> Any:
        x = torch.from_numpy(slow(i)).float()
        return (x @ torch.linspace(0, 1, 256).reshape(16, 16)).double()


class GradientsWithinASample(_Setting):
    values = (True, False)

    def set(self, value: Any) -> None:
        torch.set_grad_enabled(value)

    def __getitem__(self, i: int) -> Any:
        x = torch.from_numpy(slow(i)).requires_grad_()
        y = (x * 2).sum()
        if y.requires_grad:
            y.backward()
            return x.grad.clone()
        return x.detach()


class WarningsAsErrors(_Setting):
    def set(self, value: Any) -> None:
        warnings.resetwarnings()
        warnings.simplefilter("error" if value else "ignore")

    def __getitem__(self, i: int) -> Any:
        x = slow(i)
        try:
            return np.log(x - x.max() - i % 3)
        except RuntimeWarning:
            return np.zeros_like(x)


class RelativePaths(_Setting):
    values = ("a", "b")

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        for k, name in enumerate(self.values):
            (folder / name).mkdir()
            for i in range(N):
                np.save(folder / name / f"{i}.npy", np.full(4, i + 100.0 * k))
        super().__init__(folder)

    def set(self, value: Any) -> None:
        os.chdir(os.path.join(self.folder, value))

    def __getitem__(self, i: int) -> Any:
        return slow(i, 4) + np.load(f"{i}.npy")


class Denormals(_Setting):
    def set(self, value: Any) -> None:
        torch.set_flush_denormal(value)

    def __getitem__(self, i: int) -> Any:
        return torch.from_numpy(slow(i)).float().mul(1e-39).mul(1e3)


class TimeZone(_Setting):
    values = ("UTC", "EST5EDT")

    def set(self, value: Any) -> None:
        os.environ["TZ"] = value
        time.tzset()

    def __getitem__(self, i: int) -> Any:
        return slow(i) + datetime.datetime.fromtimestamp(1e9 + i * 3600).hour


class RecursionLimit(_Setting):
    values = (1001, 1002)

    def set(self, value: Any) -> None:
        sys.setrecursionlimit(value)

    def __getitem__(self, i: int) -> Any:
        return slow(i) * sys.getrecursionlimit()


class LevelOfAnotherLogger(_Setting):
    values = (logging.WARNING, logging.DEBUG)

    def set(self, value: Any) -> None:
        logging.getLogger("exact").setLevel(value)

    def __getitem__(self, i: int) -> Any:
        return slow(i) * (2 if LOGGER.isEnabledFor(logging.DEBUG) else 1)


LOGGER = logging.getLogger("exact.below")


# -- what a user's subclass adds to a library's class


class _Gain(Case):
    """``self.held`` has a factor that the script changes."""

    def __init__(self, folder: Path) -> None:
        self.held = self.make()

    def make(self) -> Any:
        raise NotImplementedError

    def between(self, epoch: int) -> None:
        self.held.gain = epoch + 1.0

    def __getitem__(self, i: int) -> Any:
        return slow(i) * self.held.gain


class _GainOfClass(_Gain):
    def between(self, epoch: int) -> None:
        type(self.held).gain = epoch + 1.0


class _Array(np.ndarray):  # type: ignore[type-arg]
    gain = 1.0


class _Masked(np.ma.MaskedArray):  # type: ignore[type-arg]
    gain = 1.0


class _Tensor(torch.Tensor):
    gain = 1.0


class _Bytes(bytearray):
    gain = 1.0


class _Random(random.Random):
    gain = 1.0


class _Partial(functools.partial):  # type: ignore[type-arg]
    gain = 1.0


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    gain = 1.0


class ClassOfAnArray(_GainOfClass):
    def make(self) -> Any:
        return np.ones(3).view(_Array)


class ClassOfATensor(_GainOfClass):
    def make(self) -> Any:
        return torch.ones(3).as_subclass(_Tensor)


class AttributeOfAMaskedArray(_Gain):
    def make(self) -> Any:
        return np.ma.ones(3).view(_Masked)


class AttributeOfABytearray(_Gain):
    def make(self) -> Any:
        return _Bytes(b"abc")


class AttributeOfAGenerator(_Gain):
    def make(self) -> Any:
        return _Random(3)


class AttributeOfAHandler(_Gain):
    def make(self) -> Any:
        return _Handler()


class ClassOfAPartial(_GainOfClass):
    def make(self) -> Any:
        return _Partial(slow)


class AttributeOfAPartial(_Gain):
    def make(self) -> Any:
        made: Any = functools.partial(slow, size=8)
        made.gain = 1.0
        return made


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name == "gain":
            return self.hidden
        raise AttributeError(name)


class AttributeOfAModule(_Gain):
    def make(self) -> Any:
        made = _Module("settings")
        made.hidden = 1.0  # type: ignore[attr-defined]
        return made

    def between(self, epoch: int) -> None:
        self.held.hidden = epoch + 1.0


class _Scaled(property):
    factor = 1.0

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        return self if obj is None else super().__get__(obj, owner) * self.factor


class SubclassOfProperty(Case):
    @_Scaled
    def gain(self) -> float:
        return 1.0

    def between(self, epoch: int) -> None:
        vars(type(self))["gain"].factor = epoch + 1.0

    def __getitem__(self, i: int) -> Any:
        return slow(i) * self.gain


class _Zone(datetime.tzinfo):
    hours = 0

    def utcoffset(self, _: Any) -> datetime.timedelta:
        return datetime.timedelta(hours=self.hours)

    def dst(self, _: Any) -> datetime.timedelta:
        return datetime.timedelta(0)

    def __repr__(self) -> str:
        return "a zone"


class ZoneOfATime(Case):
    def __init__(self, folder: Path) -> None:
        self.zone = _Zone()
        self.times = [datetime.datetime(2020, 1, 1, tzinfo=self.zone) for _ in range(N)]

    def between(self, epoch: int) -> None:
        self.zone.hours = epoch

    def __getitem__(self, i: int) -> Any:
        return slow(i) + self.times[i].timestamp()


# -- values that show little of themselves


def _expression(gain: float) -> Any:
    return compile(f"x * {gain}", "<settings>", "eval")


class CompiledExpression(Case):
    def __init__(self, folder: Path) -> None:
        self.code = _expression(1.0)

    def between(self, epoch: int) -> None:
        self.code = _expression(epoch + 1.0)

    def __getitem__(self, i: int) -> Any:
        return eval(self.code, {"x": slow(i)})


class SignOfNaN(Case):
    def __init__(self, folder: Path) -> None:
        self.value = float("nan")

    def between(self, epoch: int) -> None:
        self.value = -self.value

    def __getitem__(self, i: int) -> Any:
        return slow(i) * np.copysign(1.0, self.value)


class MetadataOfADtype(Case):
    def __init__(self, folder: Path) -> None:
        self.between(0)

    def between(self, epoch: int) -> None:
        self.held = np.ones(3, np.dtype("f8", metadata={"gain": epoch + 1.0}))

    def __getitem__(self, i: int) -> Any:
        return slow(i) * self.held.dtype.metadata["gain"]


class UfuncOfPython(Case):
    def __init__(self, folder: Path) -> None:
        self.between(0)

    def between(self, epoch: int) -> None:
        self.scale = np.frompyfunc(functools.partial(operator.mul, epoch + 1.0), 1, 1)

    def __getitem__(self, i: int) -> Any:
        return self.scale(slow(i, 4)).astype(float)


@dataclasses.dataclass
class _Point:
    gain: float
    offset: float


class MatchedByPosition(Case):
    def __init__(self, folder: Path) -> None:
        self.point = _Point(1.0, 0.0)

    def between(self, epoch: int) -> None:
        self.point = _Point(epoch + 1.0, 0.0)

    def __getitem__(self, i: int) -> Any:
        match self.point:
            case _Point(a, b):
                return slow(i) * a + b


class MatchedByName(MatchedByPosition):
    def __getitem__(self, i: int) -> Any:
        match self.point:
            case _Point(gain=a):
                return slow(i) * a


# -- made on first use, from what the script changes


class _MadeFrom:
    def __init__(self) -> None:
        self.made: Any = None
        self.width = 1.0


class _MadeByConstructor:
    def __init__(self, settings: _MadeFrom) -> None:
        self.row = np.full(64, settings.width)


class MadeOnAHelper(Case):
    """No worker's object is ever seen by the script's process."""

    def __init__(self, folder: Path) -> None:
        self.helper = _MadeFrom()

    def between(self, epoch: int) -> None:
        self.helper.width = 1.0 + epoch

    def __getitem__(self, i: int) -> Any:
        if self.helper.made is None:
            self.helper.made = np.full(64, self.helper.width)
        return torch.from_numpy(slow(i, 64) * self.helper.made)


class MadeByAConstructor(MadeOnAHelper):
    """It runs for a worker's first sample only, and no other code names what it reads."""

    def __getitem__(self, i: int) -> Any:
        if self.helper.made is None:
            self.helper.made = _MadeByConstructor(self.helper)
        return torch.from_numpy(slow(i, 64) * self.helper.made.row)


class MadeByAConstructorAndDrawn(MadeByAConstructor):
    def __getitem__(self, i: int) -> Any:
        return super().__getitem__(i) * random.random()


class MadeByACachedProperty(MadeOnAHelper):
    @functools.cached_property
    def row(self) -> Any:
        return _MadeByConstructor(self.helper).row

    def __getitem__(self, i: int) -> Any:
        return torch.from_numpy(slow(i, 64) * self.row)


class MadeAndAnotherAttributeChanged(Case):
    """What is made on first use does not depend on what changes, nor does what is kept."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "row.npy")
        np.save(self.path, np.full(64, 2.0))
        self.row: Any = None
        self.strength = 0.0

    def between(self, epoch: int) -> None:
        self.strength = float(epoch)

    def open_row(self) -> None:
        if self.row is None:
            self.row = np.load(self.path)

    def __getitem__(self, i: int) -> Any:
        self.open_row()
        x = slow(i, 64) * self.row
        return torch.from_numpy(x * (1.0 + self.strength * random.random()))


def _below(cls: type[Case]) -> Iterator[type[Case]]:
    for each in cls.__subclasses__():
        yield each
        yield from _below(each)


# Named by no code of a case, so that none depends on the others.
CASES = {cls.__name__: cls for cls in _below(Case) if not cls.__name__.startswith("_")}
