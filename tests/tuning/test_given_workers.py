"""A loader that the script made without workers, under ``--apply``: the script can never tell that it has some."""

from __future__ import annotations

import functools
import logging
import queue
import random
import tempfile
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from stoker.core.compare import equal_bits
from stoker.staging import change_watch
from stoker.tuning import apply

from .conftest import put_behind_apply

N, BATCH, EPOCHS = 24, 4, 3
STEP = [0]
SEEN: list[int] = []
pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore::stoker.StokerWarning")]


class Loader(DataLoader[Any]):
    """What ``--apply`` is put behind."""


class Sines(Dataset[Any]):
    """A sample takes some hundred microseconds. What it changes, and reads, is up to ``also``."""

    def __init__(self, also: Callable[[Sines, int, Any], Any] | None = None) -> None:
        self.also, self.gain, self.seen, self.row = also, 1.0, [0], torch.zeros(4)

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        x = torch.ones(32, 32) * i * self.gain
        for _ in range(12):
            x = (x @ x.t()).sin()
        return x[:2] if self.also is None else self.also(self, i, x[:2])


class Corrupt(Exception):
    def __init__(self, path: str, index: int) -> None:
        super().__init__(f"{path} is corrupt")
        self.index = index


class InTurn(Sampler[int]):
    """Knows how far it is, as samplers of runs that are resumed do."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        for self.at in range(N):
            yield self.at

    def __len__(self) -> int:
        return N


class Sized:
    """A collate function with a size, which the script changes, and a count."""

    def __init__(self, counts: bool = False) -> None:
        self.size, self.counts, self.calls = 1, counts, 0

    def __call__(self, samples: list[Any]) -> Any:
        if self.counts:
            self.calls += 1
        return torch.stack(samples)[:, : self.size]


class Together(Sines):
    """Its samples are made by the batch; ``together`` is given all of them."""

    def __init__(self, together: Callable[[Sines, int, Any], Any]) -> None:
        super().__init__()
        self.together = together

    def __getitems__(self, indices: list[int]) -> Any:
        return self.together(self, max(indices), [self[i] for i in indices])


def some_flipped(data: Sines, last: int, samples: list[Any]) -> Any:
    return [x if keep > 0.5 else -x for x, keep in zip(samples, torch.rand(len(samples)).tolist(), strict=True)]


def rarely_flipped(data: Sines, last: int, samples: list[Any]) -> Any:
    return some_flipped(data, last, samples) if last == N - 1 else samples


def broken(data: Sines, i: int, x: Any) -> Any:
    if i == N // 2:
        raise Corrupt("a.jpg", i)
    return x


def in_a_global(data: Sines, i: int, x: Any) -> Any:
    SEEN.append(i)
    return x


def in_a_rare_branch(data: Sines, i: int, x: Any) -> Any:
    if i == 17:
        SEEN.append(i)
    return x


def itself(samples: list[Any]) -> Any:
    return samples[0]


Script = Callable[[Callable[..., Any]], Iterator[Any]]


def two_at_once(loader_of: Callable[..., Any]) -> Iterator[Any]:
    first, second = (loader_of(Sines(), batch_size=BATCH, shuffle=True) for _ in range(2))
    for _ in range(EPOCHS):
        yield from zip(first, second, strict=True)


def seeded_after_iter(loader_of: Callable[..., Any]) -> Iterator[Any]:
    loader = loader_of(Sines(), batch_size=BATCH, shuffle=True)
    for epoch in range(EPOCHS):
        it = iter(loader)
        torch.manual_seed(epoch)
        yield from it


def changed_between_batches(loader_of: Callable[..., Any]) -> Iterator[Any]:
    data = Sines()
    for _ in range(EPOCHS):
        for k, batch in enumerate(loader_of(data, batch_size=BATCH)):
            yield batch
            data.gain += k == 3


def collate_resized(loader_of: Callable[..., Any]) -> Iterator[Any]:
    collate = Sized()
    loader = loader_of(Sines(), batch_size=BATCH, collate_fn=collate)
    for epoch in range(EPOCHS):
        for k, batch in enumerate(loader):
            yield batch
            collate.size = 2 if epoch and k % 3 else 1


def global_step(loader_of: Callable[..., Any]) -> Iterator[Any]:
    STEP[0] = 0
    loader = loader_of(Sines(lambda data, i, x: x + STEP[0]), batch_size=BATCH)
    for _ in range(EPOCHS):
        for batch in loader:
            yield batch
            STEP[0] += 1


def seen(also: Callable[..., Any]) -> Script:
    def script(loader_of: Callable[..., Any]) -> Iterator[Any]:
        SEEN.clear()
        for _ in range(EPOCHS):
            for batch in loader_of(Sines(also), batch_size=BATCH):
                yield batch, list(SEEN)

    return script


OF_MODULE = np.random.RandomState(3)
FACTOR = [1.0]


class Class:
    rng = random.Random(3)


def drawn_from_a_module(data: Sines, i: int, x: Any) -> Any:
    return x + OF_MODULE.rand() + Class.rng.random()


def position(data: Sines, i: int, x: Any) -> Any:
    return x * OF_MODULE.get_state()[2]


@functools.cache
def factor(i: int) -> float:
    return FACTOR[0]


@functools.lru_cache(maxsize=N // 3)
def limited_factor(i: int) -> float:
    return FACTOR[0]


def remembered(data: Sines, i: int, x: Any) -> Any:
    return x * factor(i)


def remembered_for_long(data: Sines, i: int, x: Any) -> Any:
    return x * limited_factor(i)


def in_process(also: Callable[..., Any], workers: int) -> Script:
    """What each process has for itself."""

    def script(loader_of: Callable[..., Any]) -> Iterator[Any]:
        OF_MODULE.seed(3)
        Class.rng.seed(3)
        for function in (factor, limited_factor):
            function.cache_clear()
        loader = loader_of(Sines(also), batch_size=BATCH, shuffle=True, num_workers=workers)
        for epoch in range(2 * EPOCHS):
            FACTOR[0] = 1.0 + epoch // 3
            for batch in loader:
                yield batch, OF_MODULE.get_state()[2], Class.rng.getstate()

    return script


class Watched:
    def __init__(self, gain: float) -> None:
        self.gain = gain

    def __del__(self) -> None:
        SEEN.append(int(self.gain))


def gain_of_those_left(data: Sines, i: int, x: Any) -> Any:
    return x * sum(ref.gain for ref in data.refs if ref is not None)  # type: ignore[attr-defined]


def deleted(loader_of: Callable[..., Any]) -> Iterator[Any]:
    """The script sees at once that an object of its dataset is gone, and so do samples."""
    SEEN.clear()
    data = Sines(gain_of_those_left)
    held = [Watched(k + 1.0) for k in range(EPOCHS)]
    data.refs = weakref.WeakSet(held)  # type: ignore[attr-defined]
    loader = loader_of(data, batch_size=BATCH, shuffle=True)
    while held:
        for batch in loader:
            yield batch, list(SEEN)
        held.pop()
        yield list(SEEN)


def collate_counts(loader_of: Callable[..., Any]) -> Iterator[Any]:
    collate = Sized(counts=True)
    loader = loader_of(Sines(), batch_size=BATCH, collate_fn=collate)
    for _ in range(EPOCHS):
        for batch in loader:
            yield batch, collate.calls


def sampler_asked(loader_of: Callable[..., Any]) -> Iterator[Any]:
    sampler = InTurn()
    loader = loader_of(Sines(), batch_size=BATCH, sampler=sampler)
    for _ in range(EPOCHS):
        for batch in loader:
            yield batch, sampler.at


def sampler_within_asked(loader_of: Callable[..., Any]) -> Iterator[Any]:
    sampler = InTurn()
    loader = loader_of(Sines(), batch_sampler=BatchSampler(sampler, BATCH, False))
    for _ in range(EPOCHS):
        for batch in loader:
            yield batch, sampler.at


def written_to(loader_of: Callable[..., Any]) -> Iterator[Any]:
    data = Sines(lambda data, i, x: data.row)
    loader = loader_of(data, batch_size=1, collate_fn=itself)
    for _ in range(EPOCHS):
        for batch in loader:
            batch += 1
            yield batch.clone()


def together(also: Callable[..., Any]) -> Script:
    def script(loader_of: Callable[..., Any]) -> Iterator[Any]:
        SEEN.clear()
        loader = loader_of(Together(also), batch_size=BATCH, shuffle=True)
        for _ in range(EPOCHS):
            for batch in loader:
                yield batch, len(SEEN)

    return script


def error_caught(loader_of: Callable[..., Any]) -> Iterator[Any]:
    loader = loader_of(Sines(broken), batch_size=BATCH)
    for _ in range(EPOCHS):
        try:
            yield from loader
        except Corrupt as e:
            yield str(e).partition("\n")[0], e.index


def worker_count(loader_of: Callable[..., Any]) -> Iterator[Any]:
    loader = loader_of(Sines(), batch_size=BATCH, num_workers=1, collate_fn=with_count)
    for _ in range(EPOCHS):
        yield from loader


def with_count(samples: list[Any]) -> Any:
    info = torch.utils.data.get_worker_info()
    return torch.stack(samples), 0 if info is None else info.num_workers


class Mixed(Sines):
    """Mixes a sample with one of those before it, which a global variable keeps."""

    def load(self, i: int) -> Any:
        return super().__getitem__(i)

    def __getitem__(self, i: int) -> Any:
        x = self.load(i)
        if SEEN and random.random() < 0.5:
            x = x + random.choice(SEEN)
        SEEN.append(i)
        return x


def changed_by_one_worker(loader_of: Callable[..., Any]) -> Iterator[Any]:
    SEEN.clear()
    loader = loader_of(Mixed(), batch_size=BATCH, num_workers=2)
    for _ in range(2 * EPOCHS):
        for batch in loader:
            yield batch, list(SEEN)


def class_of_no_module(loader_of: Callable[..., Any]) -> Iterator[Any]:
    module = types.ModuleType("not_registered")
    source = "class Gain:\n    k = 1.0\n    def __call__(self, data, i, x): return x * self.k"
    exec(source, vars(module))
    loader = loader_of(Sines(module.Gain()), batch_size=BATCH)
    for epoch in range(EPOCHS):
        module.Gain.k = 1.0 + (epoch > 1)
        yield from loader


class Lazy(Sines):
    """What the first sample sets in each worker is plain data, and another in each."""

    offset: float | None = None

    def __getitem__(self, i: int) -> Any:
        x = super().__getitem__(i)
        if self.offset is None:
            self.offset = random.random()
        return x + self.offset * random.random()


def set_by_the_first_sample(loader_of: Callable[..., Any]) -> Iterator[Any]:
    random.seed(3)
    loader = loader_of(Lazy(), batch_size=BATCH, num_workers=2)
    for _ in range(2 * EPOCHS):
        yield from loader


def flipped(x: Any) -> Any:
    return x.flip(0) if torch.rand(()) < 0.5 else x


def drawn_after(last: int) -> Script:
    def script(loader_of: Callable[..., Any]) -> Iterator[Any]:
        data = Sines()
        loader = loader_of(data, batch_size=BATCH, shuffle=True)
        for epoch in range(2 * EPOCHS):
            yield from loader
            yield torch.rand(())
            if epoch == last:
                data.also = lambda data, i, x: flipped(x)

    return script


def switched_on_after(last: int) -> Script:
    """The code that draws is there from the beginning."""

    def script(loader_of: Callable[..., Any]) -> Iterator[Any]:
        data = Sines(lambda data, i, x: flipped(x) if data.gain < 1 else x)
        loader = loader_of(data, batch_size=BATCH, shuffle=True)
        for epoch in range(2 * EPOCHS):
            yield from loader
            yield torch.rand(())
            if epoch == last:
                data.gain = 0.5

    return script


def in_a_queue(loader_of: Callable[..., Any]) -> Iterator[Any]:
    asked: queue.Queue[int] = queue.Queue()

    def note(data: Sines, i: int, x: Any) -> Any:
        if i % 9 == 7:
            asked.put(i)
        return x

    loader = loader_of(Sines(note), batch_size=BATCH)
    for _ in range(EPOCHS):
        for batch in loader:
            yield batch, list(asked.queue)


def logged(loader_of: Callable[..., Any]) -> Iterator[Any]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("given")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)

    def note(data: Sines, i: int, x: Any) -> Any:
        if i % 9 == 7:
            logger.info("sample %d", i)
        return x

    loader = loader_of(Sines(note), batch_size=BATCH)
    for _ in range(EPOCHS):
        for batch in loader:
            yield batch, list(lines)
    logger.removeHandler(handler)


def in_a_file(loader_of: Callable[..., Any]) -> Iterator[Any]:
    with tempfile.NamedTemporaryFile() as out:

        def note(data: Sines, i: int, x: Any) -> Any:
            if i % 9 == 7:
                with open(out.name, "a") as f:
                    f.write(f"{i} ")
            return x

        loader = loader_of(Sines(note), batch_size=BATCH)
        for _ in range(EPOCHS):
            yield list(loader)
            yield Path(out.name).read_text()


SCRIPTS = {
    "augmentation that is switched on": switched_on_after(EPOCHS),
    **{f"augmentation from epoch {k}": drawn_after(k) for k in (0, 1, EPOCHS)},
    **{f"augmentation switched on after epoch {k}": switched_on_after(k) for k in (0, 1, 2)},
    "rare samples put into a queue": in_a_queue,
    "rare samples log": logged,
    "rare samples write to a file": in_a_file,
    "two at once": two_at_once,
    "what one worker changes": changed_by_one_worker,
    "seeded after iter()": seeded_after_iter,
    "a dataset changed between batches": changed_between_batches,
    "a collate function changed between batches": collate_resized,
    "a global changed between batches": global_step,
    "samples append to a global": seen(in_a_global),
    "rare samples append to a global": seen(in_a_rare_branch),
    "generators of a module and a class": in_process(drawn_from_a_module, 2),
    "a generator that is looked at": in_process(position, 0),
    "remembered results": in_process(remembered, 2),
    "remembered results, a few": in_process(remembered_for_long, 0),
    "deleted objects": deleted,
    "batches made at once draw": together(some_flipped),
    "batches made at once rarely draw": together(rarely_flipped),
    "batches made at once append to a global": together(in_a_global),
    "rare batches made at once append to a global": together(in_a_rare_branch),
    "a collate function that counts": collate_counts,
    "a sampler that is looked at": sampler_asked,
    "a sampler within torch's that is looked at": sampler_within_asked,
    "samples that the loop writes to": written_to,
    "an error that is caught": error_caught,
    "the number of workers": worker_count,
    "a class of no module": class_of_no_module,
    "what the first sample of a worker sets": set_by_the_first_sample,
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    for name in ("TINY_BATCH_S", "TINY_SAMPLE_S"):
        monkeypatch.setattr(apply, name, 0.0)
    monkeypatch.setattr(change_watch, "COMPARED", 0)  # nothing is found by making samples again
    monkeypatch.setattr(change_watch, "QUICK_S", -1.0)  # nor by the cache: it looks as seldom as for large datasets
    monkeypatch.setattr(change_watch, "SAVED_SHARE", -1.0)
    return put_behind_apply(Loader, monkeypatch)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_gets_what_it_gets_without(name: str, applied: dict[str, Any]) -> None:
    torch.manual_seed(5)
    plain = list(SCRIPTS[name](DataLoader))
    torch.manual_seed(5)
    made = list(SCRIPTS[name](Loader))
    assert equal_bits(made, plain)
    assert applied
    print("REASON", [(e["reason"], e["to"]) for e in applied.values()])


def test_workers_are_given_where_the_script_cannot_tell(applied: dict[str, Any]) -> None:
    loader = Loader(Sines(), batch_size=BATCH, shuffle=True)
    for _ in range(EPOCHS):
        list(loader)
    (entry,) = applied.values()
    assert entry["to"]["num_workers"] == 2, entry


@pytest.mark.slow
def test_a_loader_within_a_sample_is_left_alone(applied: dict[str, Any]) -> None:
    inner: list[Any] = []

    def nested(data: Sines, i: int, x: Any) -> Any:
        inner.append(Loader([i, i + 1], batch_size=2))
        return x + sum(float(batch.sum()) for batch in inner[-1])

    loader = Loader(Sines(nested), batch_size=BATCH)
    for _ in range(2):
        list(loader)
    assert len(inner) == 2 * N
    assert len(applied) == 1


class Sums(Dataset[Any]):
    """Sums whose last bits depend on the number of threads."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> Any:
        x = torch.arange(200_000.0).add(i).sin()
        return x.sum(), x @ x


def test_sums_of_several_threads_are_theirs(applied: dict[str, Any]) -> None:
    """One thread, as a worker has, would make other bits."""
    data = Sums()
    one = [data[i] for i in range(len(data))]
    torch.set_num_threads(2)
    plain = [list(DataLoader(data, batch_size=BATCH)) for _ in range(EPOCHS)]
    assert not equal_bits([sum_ for batch in plain[0] for sum_ in batch[0]], [sum_ for sum_, _ in one])
    loader = Loader(data, batch_size=BATCH)
    assert equal_bits([list(loader) for _ in range(EPOCHS)], plain)
    (entry,) = applied.values()
    assert "number of native threads" in entry["reason"], entry


@pytest.mark.slow
def test_a_loader_with_workers_does_not_share_sums_with_one_without(applied: dict[str, Any]) -> None:
    torch.set_num_threads(2)
    for first in (0, 1):
        data = Sums()
        for workers in (first, 1 - first) * 2:
            settings = {"batch_size": BATCH, "num_workers": workers}
            assert equal_bits(list(Loader(data, **settings)), list(DataLoader(data, **settings)))


class RarelyDropped(Sines):
    """Neither the code of its samples nor the trial shows that some draw."""

    def __init__(self) -> None:
        super().__init__()
        self.then = torch.nn.Dropout(0.5)

    def __getitem__(self, i: int) -> Any:
        x = super().__getitem__(i)
        return self.then(x) if i == N - 5 else x


@pytest.mark.parametrize("shuffle", [False, True])
def test_rare_samples_that_draw_unseen(
    applied: dict[str, Any], shuffle: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def made(cls: type[DataLoader[Any]]) -> list[Any]:
        torch.manual_seed(4)
        loader = cls(RarelyDropped(), batch_size=BATCH, shuffle=shuffle)
        return [[(x, torch.rand(1)) for x in loader] for _ in range(EPOCHS)]

    found = made(Loader)
    assert "some samples draw random numbers" in capsys.readouterr().err
    assert equal_bits(found, made(DataLoader))
