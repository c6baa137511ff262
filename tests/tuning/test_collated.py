"""``--apply`` keeps what a collate function makes of single samples, and nothing that is not the same in every epoch."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from stoker.core.compare import equal_bits
from stoker.staging import vetting
from stoker.tuning import apply, managed_dataset
from tests.tuning.test_apply import Loader, applied  # noqa: F401  # a fixture

VOCAB = {"a": 1, "b": 2}
SEEN = {"texts": 0}


class Texts(Dataset[Any]):
    counts = False

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> tuple[str, int]:
        if self.counts:
            SEEN["texts"] += 1
        return f"a b {i} " * 40, i


def number(word: str, vocab: dict[str, int]) -> int:
    out = vocab.get(word, 0)
    for letter in word * 64:
        out = (out * 31 + ord(letter)) % 10_007
    return out


def encode(text: str, vocab: dict[str, int] = VOCAB) -> torch.Tensor:
    return torch.tensor([number(word, vocab) for word in text.split()])


def in_a_list(batch: list[Any]) -> Any:
    return torch.stack([encode(text) for text, _ in batch]), torch.tensor([label for _, label in batch])


def in_a_loop(batch: list[Any]) -> Any:
    out = []
    for text, label in batch:
        ids = encode(text)
        out.append(ids + label)
    return out


def pops(batch: list[Any]) -> Any:
    out = []
    while batch:
        out.append(encode(batch.pop()[0]))
    return out


def masked(batch: list[Any]) -> Any:
    out = torch.stack([encode(text) for text, _ in batch])
    return torch.where(torch.rand(out.shape) < 0.2, 0, out)


def with_length(longest: int, batch: list[Any]) -> Any:
    return [encode(text)[:longest] for text, _ in batch]


class Collator:
    def __init__(self) -> None:
        self.vocab = {"a": 5}

    def encode(self, text: str) -> torch.Tensor:
        return encode(text, self.vocab)

    def __call__(self, batch: list[Any]) -> Any:
        return [self.encode(text) for text, _ in batch]

    def collate(self, batch: list[Any]) -> Any:
        return [self.encode(text) for text, _ in batch]


def drawn(text: str) -> torch.Tensor:
    return encode(text) + random.randrange(1000)


def draws(batch: list[Any]) -> Any:
    return [drawn(text) for text, _ in batch]


def counted(text: str) -> torch.Tensor:
    return encode(text) + SEEN["texts"]


def counts_samples(batch: list[Any]) -> Any:
    return [counted(text) for text, _ in batch]


def noted(text: str) -> torch.Tensor:
    SEEN["texts"] += 1
    return encode(text)


def notes(batch: list[Any]) -> Any:
    return [noted(text) for text, _ in batch]


def cheap(batch: list[Any]) -> Any:
    return [len(text) for text, _ in batch]


def epochs(cls: Any, data: Any, collate_fn: Callable[..., Any], workers: int, count: int = 3) -> list[Any]:
    torch.manual_seed(1)
    random.seed(1)
    SEEN["texts"] = 0
    loader = cls(data, batch_size=8, shuffle=True, num_workers=workers, collate_fn=collate_fn)
    return [list(loader) for _ in range(count)]


KEPT = [
    pytest.param(in_a_list, marks=pytest.mark.slow),
    pytest.param(masked, marks=pytest.mark.slow),
    pytest.param(Collator(), marks=pytest.mark.slow),
    pytest.param(in_a_loop, marks=pytest.mark.slow),
    pytest.param(pops, marks=pytest.mark.slow),
    pytest.param(functools.partial(with_length, 300), marks=pytest.mark.slow),
    pytest.param(Collator().collate, marks=pytest.mark.slow),
    pytest.param(lambda batch: in_a_list(batch), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("collate_fn", KEPT)
def test_calls_for_single_samples_are_kept(applied: dict[str, Any], collate_fn: Any) -> None:  # noqa: F811
    expected = epochs(DataLoader, Texts(), collate_fn, 2)
    assert equal_bits(epochs(Loader, Texts(), collate_fn, 2), expected)
    (known,) = apply._datasets
    assert known.collated is not None, (known.report(), known.found and known.found.collate)
    assert known.collated.usable
    assert known.collated.account.filled == 24
    assert "encode" in known.report()["collate"]


@pytest.mark.parametrize(
    "collate_fn",
    [
        pytest.param(draws, marks=pytest.mark.slow),
        pytest.param(counts_samples, marks=pytest.mark.slow),
        pytest.param(notes, marks=pytest.mark.slow),
        pytest.param(cheap, marks=pytest.mark.slow),
        pytest.param(list, marks=pytest.mark.slow),
    ],
)
def test_what_is_another_each_time_is_not(applied: dict[str, Any], collate_fn: Any) -> None:  # noqa: F811
    data = Texts()
    data.counts = collate_fn is counts_samples
    expected = epochs(DataLoader, data, collate_fn, 2)
    assert equal_bits(epochs(Loader, data, collate_fn, 2), expected)
    (known,) = apply._datasets
    kept = known.report().get("collate", "")  # the part of it that is the same, if anything
    assert not any(name in kept for name in ("drawn", "counted", "noted"))
    assert collate_fn not in (cheap, list) or known.collated is None


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few results, of which the first only decide how results are stored, are not taken for new ones each time."""
    monkeypatch.setattr(managed_dataset, "NEW_CALLS", 1000)


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_what_changes_between_epochs_begins_another_cache(applied: dict[str, Any]) -> None:  # noqa: F811
    collator = Collator()
    loader = Loader(Texts(), batch_size=8, num_workers=2, collate_fn=collator)
    first, _ = list(loader), list(loader)
    (known,) = apply._datasets
    assert known.collated is not None, (known.report(), known.found and known.found.collate)
    assert known.collated.account.filled == 24
    collator.vocab["b"] = 9
    with pytest.warns(UserWarning, match="Cache discarded"):
        second = list(loader)
    assert not equal_bits(first, second)
    assert equal_bits(second, [collator([Texts()[i] for i in range(k, k + 8)]) for k in range(0, 24, 8)])
    for _ in range(3):
        assert equal_bits(second, list(loader))
    assert known.collated.usable
    assert known.collated.account.filled == 24


@pytest.mark.usefixtures("few")
@pytest.mark.slow
def test_another_loader_may_make_the_batches_of_another_trial(applied: dict[str, Any]) -> None:  # noqa: F811
    """A script may make a loader for each epoch, of a part of its data."""
    collator, data = Collator(), Texts()
    part = torch.utils.data.Subset(data, range(0, 24, 2))
    for asked in (data, data, part):
        list(Loader(asked, batch_size=4, num_workers=2, collate_fn=collator))
    (known,) = apply._datasets
    assert known.collated is not None
    collator.vocab["b"] = 9
    with pytest.warns(UserWarning, match="Cache discarded"):
        made = list(Loader(part, batch_size=4, num_workers=2, collate_fn=collator))
    for _ in range(3):
        assert equal_bits(made, list(DataLoader(part, batch_size=4, collate_fn=collator)))
        made = list(Loader(part, batch_size=4, num_workers=2, collate_fn=collator))
    assert known.collated is not None
    assert known.collated.account.filled == 12


class Drawn(dict[str, int]):
    """Another number for each word, each time."""

    def get(self, word: str, default: Any = None) -> Any:
        return random.randrange(100)


@pytest.mark.slow
def test_a_function_of_which_nothing_is_kept_any_more_is_named(applied: dict[str, Any]) -> None:  # noqa: F811
    collator = Collator()
    loader = Loader(Texts(), batch_size=8, num_workers=2, collate_fn=collator)
    list(loader), list(loader)
    (known,) = apply._datasets
    assert known.collated is not None
    collator.vocab = Drawn()
    with pytest.warns(UserWarning, match="Cache discarded, the dataset changed"):
        first = list(loader)
    assert known.collated is None
    assert not equal_bits(first, list(loader))


class Windows(Texts):
    """Parts of a text, at drawn places."""

    def __getitem__(self, i: int) -> tuple[str, int]:
        return f"{random.random()} a b {i} " * 40, i


@pytest.mark.slow
def test_texts_that_are_drawn_end_the_cache(
    applied: dict[str, Any],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vetting, "LIMIT_S", 60.0)  # a busy machine may take three seconds for these texts
    with pytest.warns(UserWarning, match="different arguments in each epoch"):
        batches = epochs(Loader, Windows(), in_a_list, 2)
    assert equal_bits(batches, epochs(DataLoader, Windows(), in_a_list, 2))
    (known,) = apply._datasets
    assert known.collated is not None, (known.report(), known.found and known.found.collate)
    assert not known.collated.usable


@pytest.mark.slow
def test_another_loader_has_its_own_function(applied: dict[str, Any]) -> None:  # noqa: F811
    data = Texts()
    one = Loader(data, batch_size=8, num_workers=2, collate_fn=in_a_list)
    two = Loader(data, batch_size=8, num_workers=2, collate_fn=in_a_loop)
    for loader in (one, two, one, two):
        assert equal_bits(list(loader), list(DataLoader(data, batch_size=8, collate_fn=loader.collate_fn)))
