"""Datasets that fool a cache, as people write them. Each changes something between epochs, or draws in its own way."""

from __future__ import annotations

import abc
import builtins
import collections
import configparser
import dataclasses
import decimal
import difflib
import enum
import functools
import os
import pickle
import queue
import random
import secrets
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

N = 24


class Case(Dataset[Any]):
    """A dataset, and what its script does before each epoch."""

    is_random = False  # how often samples change is compared, not their bits

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __len__(self) -> int:
        return N

    def between(self, epoch: int) -> None:
        """Before an epoch, in the script."""


def slow(i: int, size: int = 16) -> np.ndarray[Any, Any]:
    """An array that takes a tenth of a millisecond to make."""
    x = np.full((size, size), float(i + 1))
    for _ in range(20):
        x = np.sqrt(x + 1.0) * 1.5
    return x


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


def _below(cls: type[Case]) -> Iterator[type[Case]]:
    for each in cls.__subclasses__():
        yield each
        yield from _below(each)


# Named by no code of a case, so that none depends on the others.
CASES = {cls.__name__: cls for cls in _below(Case) if not cls.__name__.startswith("_")}
