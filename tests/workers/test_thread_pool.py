"""Worker threads: torch's convention for them, the same batches as processes, and what they may not do."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

import stoker
from stoker.core.compare import equal_bits
from stoker.core.errors import StokerWarning, UsageError, WorkerDiedError
from stoker.workers import rng_watch
from tests.contract.trace import canon
from tests.helpers import own_generator

SEED = int(os.environ.get("STOKER_SEED", "0"))
WAIT_S = 60


def threads(dataset: Any, workers: Any = 3, **kw: Any) -> Any:
    return stoker.DataLoader(dataset, num_workers=workers, worker_method="thread", **kw)


class Told(Dataset):
    """What a worker is told, and what its generators give."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> tuple[int, int, int, int, float, int, float]:
        info = get_worker_info()
        assert info is not None
        thread = getattr(info, "worker_method", "process") == "thread"  # torch's has it since 2.12
        python = info.rng.random_generator if thread else random
        drawn = torch.rand((), generator=own_generator())
        numpy = info.rng.numpy_generator.random() if thread else 0.0
        assert info.dataset is not None
        return i, info.id, info.num_workers, info.seed, float(drawn), python.randrange(1000), numpy


def epoch(loader: Any) -> list[Any]:
    torch.manual_seed(3)
    return [canon(batch) for batch in loader]


def test_what_a_worker_is_told() -> None:
    torch.manual_seed(3)
    ids = set()
    for batch in threads(Told(), batch_size=4):
        _, id_, count, seed, *_ = batch
        ids |= set(id_.tolist())
        assert set(count.tolist()) == {3}
        assert len(set((seed - id_).tolist())) == 1  # base seed
    assert ids == {0, 1, 2}
    assert get_worker_info() is None
    assert own_generator() is None


def test_the_same_batches_as_processes_and_the_same_again() -> None:
    first = epoch(threads(Told(), batch_size=4, shuffle=True))
    assert epoch(threads(Told(), batch_size=4, shuffle=True)) == first
    kw = {"batch_size": 4, "shuffle": True, "num_workers": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = [b[:6] for b in _plain(threads(Told(), batch_size=4, shuffle=True))]
        theirs = [b[:6] for b in _plain(torch.utils.data.DataLoader(Told(), **kw))]
    assert ours == theirs


def _plain(loader: Any) -> list[Any]:
    torch.manual_seed(3)
    return [[x.tolist() for x in batch] for batch in loader]


class Info(Dataset):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, i: int) -> str:
        info = get_worker_info()
        assert info is not None
        method = getattr(info, "worker_method", "multiprocessing")  # in processes only since torch 2.12
        return f"{threading.current_thread().name} {info.id} {method}"


def test_the_info_is_right_in_every_thread_at_once() -> None:
    """Two loaders of threads, one of processes and the main thread, all at work."""
    a, b = iter(threads(Info(), 2, batch_size=1)), iter(threads(Info(), 4, batch_size=1))
    c = iter(stoker.DataLoader(Info(), num_workers=2, batch_size=1))
    for x, y, z in zip(a, b, c, strict=True):
        for words in (x, y):
            name, id_, method = words[0].split()
            assert name == f"stoker_worker_{id_}"
            assert method == "thread"
        assert z[0].endswith("multiprocessing")
        assert get_worker_info() is None


def test_one_dataset_and_nothing_pickled() -> None:
    class Local(Dataset):
        def __init__(self) -> None:
            self.lock, self.seen, self.f = threading.Lock(), 0, lambda i: i

        def __len__(self) -> int:
            return 40

        def __getitem__(self, i: int) -> int:
            with self.lock:
                self.seen += 1
            return self.f(i)

    dataset = Local()
    assert torch.cat(list(threads(dataset, batch_size=4))).tolist() == list(range(40))
    assert dataset.seen == 40


class Stream(IterableDataset):
    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        for i in range(info.id, 30, info.num_workers):
            self.at += 1
            yield i


def test_each_thread_has_its_own_iterable() -> None:
    stream = Stream()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = [b.tolist() for b in torch.utils.data.DataLoader(stream, batch_size=4, num_workers=3)]
    for persistent in (False, True):
        loader = threads(stream, batch_size=4, persistent_workers=persistent)
        for _ in range(2):
            assert [b.tolist() for b in loader] == theirs
    assert stream.at == 0


def test_an_iterable_that_cannot_be_copied() -> None:
    stream = Stream()
    stream.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"own Stream, which cannot be copied.*worker_method=\"process\""):
        iter(threads(stream))


class Broken(Dataset):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> int:
        if i == 5:
            raise KeyError("no such sample")
        if i == 9:
            raise SystemExit
        return i


def test_errors_and_what_comes_after() -> None:
    it = iter(threads(Broken(), 2, batch_size=1))
    got, errors = [], []
    while True:
        try:
            got.append(int(next(it)))
        except StopIteration:
            break
        except (KeyError, WorkerDiedError) as e:
            errors.append(e)
    assert "in DataLoader worker thread 1" in str(errors[0])
    assert isinstance(errors[1], WorkerDiedError)
    assert "SystemExit" in str(errors[1])
    assert set(got) >= {i for i in range(20) if i % 2 == 0}
    assert got == sorted(got)


class Ends(Broken):
    def __getitem__(self, i: int) -> int:
        if i == 5:
            raise SystemExit
        return i


def test_without_threads_left_an_epoch_ends() -> None:
    loader = threads(Ends(), "auto", batch_size=1)
    loader.resize(1)
    it = iter(loader)
    got = [int(next(it)) for _ in range(3)]
    with pytest.raises(WorkerDiedError):
        [got.append(int(batch)) for batch in it]  # type: ignore[func-returns-value]
    got += [int(batch) for batch in it]
    assert got == [0, 1, 2, 3, 4]


class Slow(Dataset):
    def __init__(self, event: threading.Event) -> None:
        self.event = event

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> int:
        self.event.wait(WAIT_S)
        return i


def test_a_timeout() -> None:
    event = threading.Event()
    it = iter(threads(Slow(event), 2, timeout=0.2))
    with pytest.raises(RuntimeError, match=r"timed out after 0\.2 seconds"):
        next(it)
    event.set()
    assert int(next(it)) == 0


class Refused(Info):
    def __getitem__(self, i: int) -> str:
        raise KeyError("no such sample")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "persistent"), [("error", False), ("break", False), ("break", True), ("end", False), ("end", True)]
)
def test_no_thread_is_left(how: str, persistent: bool) -> None:
    gc.collect()
    before = set(threading.enumerate())  # some of which may end meanwhile
    loader = threads(Refused() if how == "error" else Info(), batch_size=1, persistent_workers=persistent)
    it: Any = iter(loader)
    if how == "error":
        with pytest.raises(KeyError):
            for _ in it:
                pass
    else:
        for _ in range(3 if how != "end" else 60):
            next(it)
        if how == "end":
            assert next(it, None) is None
    del it, loader
    gc.collect()  # an exception and its frames are a cycle
    deadline = time.monotonic() + WAIT_S
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert not set(threading.enumerate()) - before


class Products(Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> list[Any]:
        x = np.random.default_rng(i).normal(size=(300, 300))
        return [torch.get_num_threads(), (x @ x).tobytes(), torch.from_numpy(x).sum()]


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn", None])
def test_workers_have_the_native_threads_of_torchs(context: str | None) -> None:
    """NumPy's products have other last bits with another number of threads, and torch's workers leave that number."""
    before = torch.get_num_threads()
    kw: dict[str, Any] = {"num_workers": 2, "batch_size": None, "collate_fn": list}
    kw |= {"multiprocessing_context": context} if context else {}
    torchs = list(torch.utils.data.DataLoader(Products(), **kw))
    kw |= {} if context else {"worker_method": "thread"}
    assert equal_bits(list(stoker.DataLoader(Products(), **kw)), torchs)
    assert {n for n, *_ in torchs} == {1}
    assert torch.get_num_threads() == before
    seen: list[int] = []
    t = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    t.start()
    t.join()
    assert seen == [before]  # a thread of the user's that starts now


# ------------------------------------------------------------------------------------------- process-wide generators


class Flip:
    def __call__(self, x: Any) -> Any:
        return x if random.random() < 0.5 else -x


class Crop:
    def forward(self, x: Any) -> Any:
        return x + torch.randint(0, 9, ())


class Noise:
    def __call__(self, x: Any) -> Any:
        return x + np.random.normal()


class Quiet:
    def __call__(self, x: Any) -> Any:
        return x + torch.rand((), generator=own_generator())


class Transformed(Dataset):
    def __init__(self, transform: Any) -> None:
        self.transform = getattr(transform, "forward", transform)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> Any:
        return torch.as_tensor(self.transform(torch.tensor(float(i))))


@pytest.mark.parametrize("transform", [Flip(), Crop(), Noise()], ids=lambda t: type(t).__name__)
def test_draws_from_process_wide_generators_are_said_once_by_name(transform: Any) -> None:
    loader = threads(Transformed(transform), 2, batch_size=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            list(loader)
    said = [str(w.message) for w in caught if issubclass(w.category, StokerWarning)]
    assert len(said) == 1
    name = type(transform).__name__
    assert said[0].startswith(f"{name} (test_thread_pool.py:")
    assert "get_worker_info().rng" in said[0]
    assert ("torch.random.thread_safe_generator()" in said[0]) == hasattr(torch.random, "thread_safe_generator")


def test_generators_of_ones_own_are_no_reason() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", StokerWarning)
        loader = threads(Transformed(Quiet()), 2, batch_size=2)
        for _ in loader:
            torch.rand(1), random.random(), np.random.rand()  # the consumer may draw as it likes


def test_the_consumer_may_draw_during_a_task_that_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    own, use, state = torch.Generator(), rng_watch.GlobalRngUse(), rng_watch._torch_state
    states: list[int] = []

    def torch_state() -> int:
        if len(states) in (1, 13, 25):
            torch.rand(1)  # the consumer, in the middle of a few of the calls
        states.append(state())
        return states[-1]

    monkeypatch.setattr(rng_watch, "_torch_state", torch_state)
    monkeypatch.setattr(rng_watch, "REWATCH_S", 0.0)
    monkeypatch.setattr(rng_watch, "REWATCH_SHARE", 0)
    for _ in range(20):
        use.run(0, lambda: torch.rand(2, generator=own))
    assert states[0] != states[1]
    assert use.who is None
    for _ in range(2):
        use.run(1, lambda: torch.rand(2))
    assert use.who is not None


@pytest.mark.slow
def test_draws_that_begin_in_a_later_epoch_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixup after the warm-up."""
    monkeypatch.setattr(rng_watch, "REWATCH_S", 0.0)
    monkeypatch.setattr(rng_watch, "REWATCH_SHARE", 1)

    class Late:
        begun = False

        def __call__(self, x: Any) -> Any:
            return x + random.random() if self.begun else x

    transform = Late()
    loader = threads(Transformed(transform), 2, batch_size=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", StokerWarning)
        for _ in range(4):
            list(loader)
    transform.begun = True
    with pytest.warns(StokerWarning, match=r"^Late \(test_thread_pool.py:\d+\) draws"):
        [list(loader) for _ in range(50)]


# ------------------------------------------------------------------------------------------------------------ choice


@pytest.mark.parametrize("wrong", ["threads", "auto", "", None, 3, "multiprocess"])
def test_an_unknown_method(wrong: Any) -> None:
    with pytest.raises(UsageError, match=r"worker_method must be one of 'process', 'thread'"):
        stoker.DataLoader(Info(), worker_method=wrong)


def test_a_context_means_nothing_to_threads() -> None:
    with pytest.raises(UsageError, match="Remove one of the two"):
        threads(Info(), multiprocessing_context="fork")


# -------------------------------------------------------------------------------------------------------------- bits


class Noisy(Dataset):
    def __init__(self, floats: int) -> None:
        self.floats = floats

    def __len__(self) -> int:
        return 600

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((self.floats,), float(i))


@pytest.mark.parametrize("floats", [10, 20_000])
@pytest.mark.timeout(120)
@pytest.mark.few(1)
def test_batches_are_intact_whatever_is_kept_and_dropped(floats: int) -> None:
    print(f"STOKER_SEED={SEED}")
    r = random.Random(SEED)
    loader = threads(Noisy(floats), 3, batch_size=2, persistent_workers=True)
    kept: list[tuple[int, torch.Tensor]] = []
    for _ in range(3):
        for i, batch in enumerate(loader):
            kept.append((i, batch[r.randrange(2) :]))
            while len(kept) > r.randrange(1, 12):
                at, part = kept.pop(r.randrange(len(kept)))
                assert part.shape[1] == floats
                assert bool((part[-1] == 2.0 * at + 1).all())
                part.fill_(-1)  # a batch is the consumer's


def test_memory_is_used_again() -> None:
    loader = threads(Noisy(100_000), 2, batch_size=4)
    places = {batch.data_ptr() for _ in range(2) for batch in loader}
    assert len(places) < 20  # of 300 batches, by workers of two epochs


def test_memory_is_freed_without_the_garbage_collector() -> None:
    loader = threads(Noisy(400_000), 2, batch_size=4)
    it = iter(loader)
    next(it)
    worker, writer = it._workers[0], weakref.ref(it._workers[0].writer)
    pool = weakref.ref(worker._pool)
    del worker
    gc.disable()
    try:
        del it, loader
        assert pool() is None
        assert writer() is None
    finally:
        gc.enable()


def test_the_consumer_may_keep_everything() -> None:
    kept = list(threads(Noisy(40_000), 2, batch_size=4))
    assert [int(b[0, 0]) for b in kept] == list(range(0, 600, 4))


def test_rows_are_gathered() -> None:
    rows = torch.arange(1000.0).reshape(100, 10)
    batches = list(threads(TensorDataset(rows), batch_size=10, shuffle=True))
    assert torch.cat([x for (x,) in batches]).sort(0).values.equal(rows)


def test_a_forked_child_sees_what_it_saw() -> None:
    it = iter(threads(Noisy(40_000), 2, batch_size=4))
    batch = next(it)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, b"1" if set(batch[0, ::100].tolist()) == {0.0} else b"0")
        os._exit(0)
    for _ in range(20):
        next(it)
    assert os.read(read, 1) == b"1"
    os.waitpid(pid, 0)


def test_slots_die_with_their_loader() -> None:
    batch = next(iter(threads(Noisy(40_000), 2, batch_size=4)))
    assert bool((batch[0] == 0).all())
    assert sys.getrefcount(batch) < 4
