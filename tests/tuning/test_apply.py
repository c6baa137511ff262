"""What ``--apply`` decides of a loader, in the script's own process."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from stoker.core.compare import equal_bits
from stoker.core.errors import UsageError
from stoker.core.random_state import RandomState
from stoker.loader.loader_state import state_of
from stoker.staging.isolate import Trial, run_isolated
from stoker.tuning import apply

from .conftest import put_behind_apply


class Slow(Dataset[Any]):
    """A sample takes about half a millisecond."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> Any:
        return torch.from_numpy(np.roll(slow(np.arange(2000, dtype=np.float64) + i), random.randrange(9)))


class Loader(DataLoader[Any]):
    """What ``--apply`` is put behind."""


class Drawn(Dataset[Any]):
    """A script may set ``parts``, functions of an array, until it iterates."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> Any:
        x = np.arange(2000, dtype=np.float64) + i
        for part in self.parts:
            x = part(x)
        return torch.from_numpy(x)


def slow(x: Any) -> Any:
    for _ in range(40):
        x = np.log(np.exp(x / 5000)) * 5000
    return x


def roll(x: Any) -> Any:
    return np.roll(x, random.randrange(1000))


def negative(x: Any) -> Any:
    return -x


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return put_behind_apply(Loader, monkeypatch)


def test_a_trial_begins_when_a_loader_is_made(applied: dict[str, Any]) -> None:
    data, other = Drawn([slow, roll]), Drawn([slow, negative, roll])
    loader, second = Loader(data, batch_size=8), Loader(other, batch_size=8)
    apply.loader_made(loader)
    apply.loader_made(second)  # while the first one's runs
    (known,) = apply._datasets
    trial = known.trial
    assert trial is not None
    it = iter(loader)
    assert known.staged is not None
    assert known.start_s > 0
    assert apply._datasets[1].trial is not None  # now it does no longer
    assert len(list(it)) == 8
    assert len(list(second)) == 8
    assert apply._datasets[1].staged is not None
    assert len(apply._datasets) == 2


@pytest.mark.slow
def test_what_the_script_changes_after_a_loader_is_made_is_looked_at_anew(applied: dict[str, Any]) -> None:
    """Of samples that do not draw, all would be kept, until one was seen to draw."""
    data = Drawn([slow, negative])
    loader = Loader(data, batch_size=8)
    apply.loader_made(loader)
    (known,) = apply._datasets
    assert known.trial is not None
    assert known.trial.wait(60)
    data.parts.append(roll)
    epochs = [torch.cat(list(loader)) for _ in range(3)]
    assert known.staged is not None
    assert known.staged.usable
    assert known.staged.account.filled == 64
    for one, two in itertools.pairwise(epochs):
        assert not torch.equal(one, two)


@pytest.mark.slow
def test_a_loader_that_is_made_does_not_change_what_another_one_uses(applied: dict[str, Any]) -> None:
    """Two datasets with the same content share a cache, and each loader's random part is its own dataset's."""
    data, same = Drawn([slow, roll]), Drawn([slow, roll])
    loader = Loader(data, batch_size=8)
    apply.loader_made(loader)
    second = Loader(same, batch_size=8)
    apply.loader_made(second)
    assert len(list(loader)) == 8
    (known,) = apply._datasets
    assert known.dataset is data
    assert len(list(second)) == 8
    assert known.dataset is same


@pytest.mark.slow
def test_files_that_come_after_a_loader_is_made(applied: dict[str, Any], tmp_path: Path) -> None:
    """``dataset = Images(folder); loader = DataLoader(dataset); download(folder)``."""
    data = Drawn([lambda x: x + float((tmp_path / "offset").read_text()), slow, roll])
    loader = Loader(data, batch_size=8)
    apply.loader_made(loader)
    (known,) = apply._datasets
    assert known.trial is not None
    assert known.trial.wait(60)
    (tmp_path / "offset").write_text("3")
    assert len(list(loader)) == 8
    assert known.staged is not None


class Shifted(Drawn):
    """As ``Drawn``, but what is kept reads ``epoch``."""

    def __getitem__(self, i: int) -> Any:
        return super().__getitem__(i + self.epoch)

    epoch = 0


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "filled_from"), [(Drawn, 1), (Shifted, 8)])
def test_what_changes_in_each_epoch_does_not_keep_trials_going(
    applied: dict[str, Any], monkeypatch: pytest.MonkeyPatch, kind: type[Drawn], filled_from: int
) -> None:
    """The trial ends beside an epoch, and before each the script counts. What does not read the count is kept."""
    monkeypatch.setattr(apply, "WAIT_S", 0.0)
    data = kind([slow, roll])
    loader = Loader(data, batch_size=8)
    filled = []
    for epoch in range(8):
        data.epoch = epoch  # type: ignore[attr-defined]
        batches = iter(loader)
        next(batches)
        with monkeypatch.context() as patch:  # on a busy machine the trial may end within the epoch
            patch.setattr(Trial, "wait", lambda trial, s: False)
            assert len(list(batches)) == 7
        (known,) = apply._datasets
        assert known.trial is None or known.trial.wait(60)
        filled.append(0 if known.staged is None else known.staged.account.filled)
    assert filled == [0] * filled_from + [64] * (8 - filled_from)
    assert known.trial is None


@pytest.mark.slow
def test_workers_are_decided_on_again_when_the_trial_has_ended(
    applied: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader without workers kept none for ever where the trial took longer than the script waits for it."""

    monkeypatch.setattr(apply, "WAIT_S", 0)
    monkeypatch.setattr(apply, "first_guess", lambda loader: (2, "two cores"))
    loader = Loader(Drawn([*[slow] * 4, negative]), batch_size=8)  # so slow that workers help
    with monkeypatch.context() as patch:
        patch.setattr(Trial, "wait", lambda trial, s: False)
        assert len(list(loader)) == 8
    assert applied["Loader of Drawn"]["reason"] == "kept 0: the trial run has not finished yet"
    known = apply._datasets[0]
    assert known.trial is not None
    assert known.trial.wait(60)
    for _ in range(2):
        assert len(list(loader)) == 8
        assert applied["Loader of Drawn"]["from"]["num_workers"] == 0
        assert applied["Loader of Drawn"]["to"]["num_workers"] == 2, applied
    assert len(apply._entries) == 1


@pytest.mark.few(1)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_single_pass_of_a_script_that_predicts_is_not_kept(applied: dict[str, Any], context: Any) -> None:
    loader = Loader(Slow(), batch_size=8)
    with context():
        list(loader)
        (known,) = apply._datasets
        apply.refresh()
        (entry,) = applied.values()
        assert known.staged is not None
        assert known.staged.account.filled == 0
        assert "a single pass" in entry["cache"]["why_not"]
        assert "staged" not in entry["to"]
        list(loader)
        apply.refresh()
    assert known.staged.account.filled == 64
    assert entry["to"]["staged"]


def test_parts_of_a_dataset_are_one_pass(applied: dict[str, Any]) -> None:
    first, second = (Subset(Slow(), range(k, k + 32)) for k in (0, 32))
    second.dataset = first.dataset
    with torch.no_grad():
        for filled, part in ((0, first), (0, second), (32, first)):
            list(Loader(part, batch_size=8))
            (known,) = apply._datasets
            assert known.staged is not None
            assert known.staged.account.filled == filled


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["shuffle", "gradients", "after training"])
def test_a_first_pass_of_a_script_that_trains_is_kept(applied: dict[str, Any], how: str) -> None:
    if how == "after training":
        list(Loader(list(range(9))))
    with torch.set_grad_enabled(how == "gradients"):
        list(Loader(Slow(), batch_size=8, shuffle=how == "shuffle"))
    known = apply._datasets[-1]
    assert known.staged is not None
    assert known.staged.account.filled == 64


class Texts(Dataset[Any]):
    """Samples that lie in memory."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> Any:
        return "text"


@pytest.mark.few(1)
@pytest.mark.parametrize(("wait_s", "workers"), [(1.0, 2), (0.001, 0)])
def test_a_collate_function_that_takes_long_gets_workers(
    applied: dict[str, Any], monkeypatch: pytest.MonkeyPatch, wait_s: float, workers: int
) -> None:
    monkeypatch.setattr(apply, "first_guess", lambda loader: (2, "two"))
    loader = Loader(Texts(), batch_size=8, collate_fn=len)
    assert list(loader) == [8] * 8
    assert int(loader.num_workers) == 0
    batches, step_s = 8.0, 0.1  # as an observed epoch comes out
    state_of(loader).metrics.by_epoch.append((batches, wait_s, step_s, 0.0, wait_s + step_s, 64.0, 0.0))
    assert list(loader) == [8] * 8
    assert int(loader.num_workers) == workers


class Windows(Dataset[Any]):
    """Is asked for windows of scenes, as its sampler draws them."""

    def __len__(self) -> int:
        return 64

    def scene(self, number: int) -> Any:
        return slow(np.arange(4000, dtype=np.float64) + number)

    def __getitem__(self, window: tuple[int, int]) -> Any:
        number, start = window
        return torch.from_numpy(roll(self.scene(number)[start : start + 100]))


class Draws:
    """A sampler of windows."""

    def __iter__(self) -> Any:
        return ((random.randrange(8), random.randrange(3900)) for _ in range(64))

    def __len__(self) -> int:
        return 64


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_indices_that_are_no_numbers(applied: dict[str, Any], monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """The trial asks the loader's sampler for some; calls that do not depend on the rest of an index are kept."""
    monkeypatch.setattr(apply, "first_guess", lambda loader: (workers, "as it has"))

    def epochs(cls: type[DataLoader[Any]]) -> list[Any]:
        random.seed(3)
        torch.manual_seed(3)
        loader = cls(Windows(), batch_size=8, sampler=Draws(), num_workers=workers)
        return [batch for _ in range(3) for batch in loader]

    assert all(torch.equal(a, b) for a, b in zip(epochs(Loader), epochs(DataLoader), strict=True))
    (known,) = apply._datasets
    assert known.staged is not None, known.reason
    assert known.staged.account.filled == 8


class Stuck(Slow):
    """Its samples wait for ever in a trial, and take SIGALRM for a timeout of their own."""

    def __init__(self) -> None:
        self.process = os.getpid()

    def __getitem__(self, i: int) -> Any:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.alarm(0)
        if os.getpid() != self.process:
            while True:
                time.sleep(1000)
        return torch.zeros(2)


@pytest.fixture
def alarm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGALRM)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.slow
def test_one_trial_runs_and_ends_with_its_dataset(
    applied: dict[str, Any], monkeypatch: pytest.MonkeyPatch, alarm: None
) -> None:
    monkeypatch.setattr(apply, "WAIT_S", 0.0)
    first = Loader(Stuck(), batch_size=8)
    assert sum(1 for _ in first) == 8
    (known,) = apply._datasets
    assert known.is_trying
    other = Loader(Drawn([slow, roll]), batch_size=8)
    for _ in range(2):
        assert sum(1 for _ in other) == 8
    assert [known.is_trying for known in apply._datasets] == [True, False]  # a trial more waits for its turn
    trial = known.trial
    assert trial is not None
    pid = trial._pid
    del first
    assert not known.is_trying
    assert not os.path.exists(f"/proc/{pid}")  # killed, and reaped
    monkeypatch.setattr(apply, "WAIT_S", 60.0)
    assert sum(1 for _ in other) == 8
    assert apply._datasets[-1].found is not None


def test_a_script_that_makes_its_dataset_anew_has_one_trial(
    applied: dict[str, Any], monkeypatch: pytest.MonkeyPatch, alarm: None
) -> None:
    monkeypatch.setattr(apply, "WAIT_S", 0.0)
    before = len(children())
    refs = []
    for _ in range(4):
        loader = Loader(Stuck(), batch_size=8)
        refs.append(weakref.ref(loader.dataset))
        assert sum(1 for _ in loader) == 8
        assert len(children()) <= before + 1
    del loader
    assert len(children()) == before
    assert not any(ref() for ref in refs)  # nothing of stoker's holds a dataset that has no cache


def children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def test_the_kernel_ends_a_trial_that_takes_too_long(alarm: None) -> None:
    data = Stuck()
    with pytest.raises(UsageError, match="it took too long"):
        run_isolated(lambda: data[0], limit_s=0.2)


class Labelled(Drawn):
    """Of one class, which is no sample of the trial's, it draws."""

    rare = -1

    def __getitem__(self, i: int) -> Any:
        x = super().__getitem__(i)
        return (x + torch.rand(1) if i == self.rare else x), i


def shaken(samples: list[Any]) -> Any:
    return torch.stack([x for x, _ in samples]) + float(np.random.rand()), torch.tensor([i for _, i in samples])


def stacked(samples: list[Any]) -> Any:
    return torch.stack([x for x, _ in samples]), torch.tensor([i for _, i in samples])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("parts", "rare", "collate_fn", "counts"),
    [
        ([slow, roll], -1, None, [0, 0, 0]),
        ([slow, roll], -1, stacked, [0, 0, 0]),
        ([slow, negative], 37, None, [0, 0, 0]),
        ([slow, negative], -1, shaken, [0, 0, 0]),
        ([slow, negative], -1, stacked, [0, 2, 2]),
    ],
    ids=["samples", "samples and a function", "few samples", "collate_fn", "none"],
)
def test_a_script_without_workers_draws_what_it_drew(
    applied: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    parts: list[Any],
    rare: int,
    collate_fn: Any,
    counts: list[int],
) -> None:
    """Where making a batch draws in the script's process, workers would have that draw elsewhere, and the sampler's
    next order would be another. With and without ``--apply`` batches and random states are the same to the bit."""
    monkeypatch.setattr(apply, "first_guess", lambda loader: (2, "two"))
    monkeypatch.setattr(apply, "TINY_BATCH_S", 0.0)
    monkeypatch.setattr(apply, "TINY_SAMPLE_S", 0.0)

    def epochs(cls: type[DataLoader[Any]]) -> list[Any]:
        data = Labelled(parts)
        data.rare = rare
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)
        loader = cls(data, batch_size=8, shuffle=True, collate_fn=collate_fn)
        out = []
        for _ in counts:
            batches = list(loader)
            out.append((int(loader.num_workers), batches, RandomState()))
        return out

    for (count, batches, states), (_, own, own_states), wanted in zip(
        epochs(Loader), epochs(DataLoader), counts, strict=True
    ):
        assert count == wanted, applied
        assert equal_bits(batches, own)
        assert states == own_states


@pytest.mark.slow
def test_a_loader_that_draws_nothing_gets_workers_at_once(
    applied: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply, "first_guess", lambda loader: (2, "two"))
    monkeypatch.setattr(apply, "TINY_BATCH_S", 0.0)
    monkeypatch.setattr(apply, "TINY_SAMPLE_S", 0.0)
    loader = Loader(Drawn([slow, negative]), batch_size=8, shuffle=True)
    assert len(list(loader)) == 8
    assert int(loader.num_workers) == 2
