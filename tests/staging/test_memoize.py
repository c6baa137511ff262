"""Calls that are pure in their arguments are answered from memory: what a cut cannot reach."""

from __future__ import annotations

import ast
import random
import textwrap
import time
import warnings
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, ConcatDataset, Dataset, RandomSampler, StackDataset, Subset

import stoker
from stoker.core.compare import equal_bits
from stoker.staging import memoize, pure_calls
from stoker.staging.callee import Call
from stoker.staging.memoize import Table, call_key, is_small, names_of
from stoker.staging.rewrite_calls import arguments_before_calls
from stoker.staging.samples import TrialSamples
from stoker.staging.syntax import attributes_assigned
from stoker.staging.trial import TrialResult

SIZE = 24


@pytest.fixture(autouse=True)
def pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it pays is not asked: that depends on what else the machine does."""

    def pays(survey: pure_calls.Survey, plan: pure_calls.MemoPlan, _: Any) -> bool:
        survey._plain_s, plan.served_s = 1.0, 0.0
        return True

    monkeypatch.setattr(pure_calls.Survey, "_pays", pays)


def slow_array(seed: int) -> np.ndarray[Any, Any]:
    """Work that takes about a millisecond and depends on its argument alone."""
    x = np.arange(2048.0).reshape(32, 64)
    for _ in range(20):
        x = np.sin(x) + seed
    return np.full((8, 8), seed, np.float32)


class Samples(Dataset[Any]):
    def __init__(self) -> None:
        self.numbers = list(range(100, 100 + SIZE))
        self.scale = 1
        self.loads = 0

    def __len__(self) -> int:
        return SIZE

    def load_image(self, i: int) -> Any:
        return torch.from_numpy(slow_array(self.numbers[i])) * self.scale


class Mosaic(Samples):
    mosaic = True

    def load_mosaic(self, i: int) -> Any:
        others = [i, *random.choices(range(len(self)), k=3)]
        return torch.cat([self.load_image(j) for j in others])

    def __getitem__(self, i: int) -> Any:
        image = self.load_mosaic(i) if self.mosaic and random.random() < 2 else self.load_image(i)
        return image.flip(0) if random.random() < 0.5 else image, i


def test_short_calls_that_are_made_often_are_kept() -> None:
    survey = pure_calls.Survey(TrialSamples(Samples()))
    survey._least_s, survey._samples = 1e-3, 3
    assert survey._slow({1: [4e-4] * 12, 2: [4e-4] * 3, 3: [5e-3] * 3, 4: [1e-5] * 900}) == {1, 3}


class Pair(Samples):
    def __getitem__(self, i: int) -> Any:
        other = int(torch.randint(len(self), ()))
        return self.load_image(i), self.load_image(other), other


class WithNone(Pair):
    def load_image(self, i: int) -> Any:
        return {"x": super().load_image(i), "mask": None, "again": None}


class Aliases(Pair):
    def load_image(self, i: int) -> Any:
        x = super().load_image(i)
        return {"x": x, "same": x}


def test_a_result_may_hold_none_and_no_object_twice() -> None:
    data = stoker.Staged(WithNone())
    list(stoker.DataLoader(data, batch_size=8, collate_fn=list))
    assert data.account.filled
    assert "super().load_image(i)  cached" in str(stoker.Staged(Aliases()).split)  # and not what returns it twice


def test_a_call_whose_results_cannot_be_cached_is_only_made(monkeypatch: pytest.MonkeyPatch) -> None:
    data = stoker.Staged(Pair())
    states: list[int] = []
    monkeypatch.setattr(memoize, "MOST_NOT_KEPT", 10)
    monkeypatch.setattr(memoize, "take_known", lambda *_, **__: states.append(1))
    for _ in range(3):
        list(stoker.DataLoader(data, batch_size=8))
    assert len(states) <= 20
    assert not data.account.filled


def looped() -> list[Any]:
    made = []
    for k in range(2):

        def op(j: int, k: int = k) -> int:
            return j + k

        op.__qualname__ = "op"  # as at the top level of a module
        made.append(op)
    return made


class Partly(NamedTuple):
    shown: int
    hidden: int

    def __repr__(self) -> str:
        return f"Partly({self.shown})"


def test_functions_that_one_place_defines_have_keys_of_their_own() -> None:
    both = [lambda j: j + 1, lambda j: j - 1]
    for one, other in (both, looped()):
        assert call_key(Call(one, (3,), {}), {}) != call_key(Call(other, (3,), {}), {})
    big = [torch.zeros(9), torch.ones(9)]
    for function, values in zip(looped(), big, strict=True):
        function.__defaults__ = (values,)
        assert call_key(Call(function, (3,), {}), {}) is None


def test_values_whose_text_leaves_something_out_are_no_keys() -> None:
    assert not is_small(Partly(1, 2))
    assert not is_small(np.zeros(1, [("x", "f4", 2000)])[0])
    assert is_small((1, np.float32(2)))


class Path(Samples):
    """A chain of calls on something that is no small value, known by the variable at its root."""

    def __getitem__(self, i: int) -> Any:
        number = self.numbers[random.randrange(len(self))]
        return slow_array(number).repeat(2, axis=0) + i


class Record:
    def __init__(self, number: int) -> None:
        self.number = number


class File:
    """What is no small value itself. What it holds is made by native code."""

    def __init__(self, number: int) -> None:
        self.matrix = torch.full((16, 16), (1 + number / 1e6) / 16)


class OfRecords(Samples):
    """Draws records, and loads by what stands in them."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = [{"number": n, "of": [n, n + 1], "classes": np.arange(9)} for n in self.numbers]
        self.records = [Record(n) for n in self.numbers]

    def __getitem__(self, i: int) -> Any:
        row, other = self.rows[i], random.choice(self.records)
        label = random.choice(row["classes"])
        image = File(row["number"]).matrix.matrix_power(1023)
        image = File(number=other.number).matrix.matrix_power(1023) - image
        for x in random.choices(self.rows, k=2):
            image = File(x["of"][1]).matrix.matrix_power(1023) - image
        return image[0], label


@pytest.fixture
def calls_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are kept however fast they are today."""
    for limit, value in (("WORTH_SHARE", 0.0), ("WORTH_S", 0.0), ("PAYS", float("inf"))):
        monkeypatch.setattr(f"stoker.staging.pure_calls.{limit}", value)
    monkeypatch.setattr("stoker.staging.trial._find_cut", lambda *_: TrialResult(None, [], ""))


@pytest.mark.usefixtures("calls_pay")
def test_calls_are_known_by_parts_of_records() -> None:
    shown = str(stoker.split(OfRecords()))
    for call in ("File(row['number']).matrix", "File(number=other.number).matrix", "File(x['of'][1]).matrix"):
        assert call in shown


class InPlace(Mosaic):
    """What is handed out is written to."""

    def __getitem__(self, i: int) -> Any:
        j = random.randrange(len(self))
        image = self.load_image(j)
        image += i
        return image


class Frames(Samples):
    """A chain of calls in a comprehension, known by the comprehension's variable, too."""

    def __getitem__(self, i: int) -> Any:
        first = random.randrange(4)
        return np.stack([slow_array(self.numbers[i]).repeat(1 + k, axis=0)[:8] * k for k in range(first, first + 3)])


class Wrapped(Samples):
    """Its samples are asked for by subscripts, in a comprehension."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = {"one": Mosaic(), "two": Pair()}

    def __getitem__(self, i: int) -> Any:
        return {name: part[i] for name, part in self.parts.items()}


class Inherits(Pair):
    """A class between draws first."""

    def __getitem__(self, i: int) -> Any:
        shift = random.random()
        return super().__getitem__(i)[0] + shift


def batches(data: Any, epochs: int = 3, workers: int = 0, change: Any = None) -> list[Any]:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    loader = stoker.DataLoader(data, batch_size=4, shuffle=True, num_workers=workers)
    out = []
    for epoch in range(epochs):
        if change is not None:
            change(epoch)
        out.append([batch for batch in loader])  # noqa: C416
    return [*out, random.random(), torch.rand(2)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "workers"), [(Pair, 0), (Path, 0), (OfRecords, 0), (InPlace, 0), (Mosaic, 2)])
@pytest.mark.few(1)
def test_no_bit_changes_and_what_was_loaded_is_not_loaded_again(
    kind: Any, workers: int, request: pytest.FixtureRequest
) -> None:
    if kind is OfRecords:  # how long a power of a matrix takes depends on the machine
        request.getfixturevalue("calls_pay")
    staged = stoker.Staged(kind())
    assert staged.split is not None
    assert staged.split.memo is not None, staged.split
    plain, kept = batches(kind(), workers=workers), batches(staged, workers=workers)
    assert equal_bits(plain, kept)
    account, most = staged.account, SIZE * (3 if kind is OfRecords else 1)  # three calls, each known by other variables
    assert most // 2 <= account.filled <= most
    assert account.prepared <= most * max(1, workers) + 8  # two workers may load the same one at a time


@pytest.mark.parametrize(
    "make",
    [
        Frames,
        Wrapped,
        Inherits,
        lambda: Subset(Pair(), range(2, SIZE)),
        lambda: ConcatDataset([Pair(), Pair()]),
        lambda: Subset(StackDataset(one=Pair(), two=Mosaic()), range(SIZE)),
    ],
    ids=["comprehension", "items", "super", "Subset", "ConcatDataset", "StackDataset"],
)
@pytest.mark.slow
def test_calls_inside_other_datasets_and_comprehensions_are_kept(make: Any) -> None:
    staged = stoker.Staged(make())
    assert staged.split is not None
    assert staged.split.memo is not None, staged.split
    assert equal_bits(batches(make()), batches(staged))


class Turned(Samples):
    """A call of this sample and something drawn does not come again; what it calls does."""

    def turned(self, i: int, angle: Any) -> Any:
        return self.load_image(i) * angle

    def __getitem__(self, i: int) -> Any:
        return self.turned(i, 1.0 + random.random())


class Placed(Turned):
    def __getitem__(self, i: int) -> Any:
        return self.turned(i, random.randrange(1, 200))


class Brightened(Turned):
    """Nor does one of something drawn from all numbers."""

    def __getitem__(self, i: int) -> Any:
        return self.turned(random.randrange(SIZE), 1.0 + random.random())


class Window(Samples):
    """A part of a long text, at a drawn place."""

    text = "".join(chr(97 + k * k % 26) for k in range(9000))

    def encode(self, text: str) -> Any:
        x = np.arange(2048.0)
        for _ in range(40):
            x = np.sin(x) + ord(text[0])
        return torch.from_numpy(x[:64].reshape(8, 8).astype(np.float32))

    def __getitem__(self, i: int) -> Any:
        start = 100 * i + random.randrange(100)
        code = self.encode(self.text[start : start + 3000])
        return self.load_image(i) + code, i


class Flipped(Turned):
    """One of this sample and one of two values comes again."""

    def __getitem__(self, i: int) -> Any:
        return self.turned(i, random.choice([1, 2]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "most"),
    [
        (Turned, "load_image", 1),
        (Placed, "load_image", 1),
        (Brightened, "load_image", 1),
        (Flipped, "turned", 2),
        (Window, "load_image", 1),
    ],
)
def test_calls_that_do_not_come_again_are_not_kept(kind: type[Samples], name: str, most: int) -> None:
    staged = stoker.Staged(kind())
    assert staged.split is not None
    assert staged.split.memo is not None, staged.split
    assert name in str(staged.split)
    assert equal_bits(batches(kind(), 4), batches(staged, 4))
    assert SIZE // 2 <= staged.account.filled <= most * SIZE


class ByBatch(Pair):
    """Is asked for lists of indices: batch_size=None, and a BatchSampler as its sampler."""

    def __getitem__(self, indices: Any) -> Any:
        return torch.stack([self.load_image(i) for i in indices]) + random.random(), indices


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_calls_of_a_dataset_that_is_asked_for_lists_are_kept(workers: int) -> None:
    def epochs(data: Any) -> list[Any]:
        torch.manual_seed(1)
        random.seed(1)
        sampler = BatchSampler(RandomSampler(range(SIZE)), 4, drop_last=False)
        loader = stoker.DataLoader(data, batch_size=None, sampler=sampler, num_workers=workers)
        return [list(loader) for _ in range(3)]

    staged = stoker.Staged(ByBatch())
    assert equal_bits(epochs(ByBatch()), epochs(staged))
    assert staged.account.filled == SIZE


class Mixes:
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __call__(self, labels: Any) -> Any:
        others = [self.dataset.label_of(random.randrange(SIZE)) for _ in range(3)]
        labels["image"] = np.concatenate([x["image"] for x in (labels, *others)])
        return labels


class Buffered(Samples):
    """ultralytics': deep in containers of transforms an image is loaded, and stays in the dataset for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.images: list[Any] = [None] * SIZE
        self.buffer: list[int] = []
        self.transform = Chain(Chain(Chain(Mixes(self))))

    def load_image(self, i: int) -> Any:
        image = self.images[i]
        if image is None:
            number = self.numbers[i]
            self.images[i] = image = slow_array(number)
            self.buffer.append(i)
            if len(self.buffer) > 8:
                self.images[self.buffer.pop(0)] = None
        return image

    def label_of(self, i: int) -> Any:
        return {"image": self.load_image(i), "number": i}

    def __getitem__(self, i: int) -> Any:
        return self.transform(self.label_of(i))


@pytest.mark.slow
def test_what_is_loaded_deep_inside_is_kept_although_the_dataset_holds_some_of_it() -> None:
    staged = stoker.Staged(Buffered())
    assert staged.split is not None
    assert "slow_array(number)" in str(staged.split)
    memo = staged.split.memo
    assert memo is not None
    assert memo.nbytes > 0  # it was called when it was verified
    assert equal_bits(batches(Buffered()), batches(staged))


@pytest.mark.slow
def test_a_branch_that_no_trial_took_is_served_from_what_another_loaded() -> None:
    data = Mosaic()
    staged = stoker.Staged(data)

    def close_mosaic(epoch: int) -> None:
        data.mosaic = epoch < 2

    kept = batches(staged, 3, change=close_mosaic)
    loaded = staged.account.prepared
    assert loaded <= SIZE + 16  # of 216 calls; the first few are held back until it is decided how samples lie
    plain = Mosaic()

    def close_plain(epoch: int) -> None:
        plain.mosaic = epoch < 2

    assert equal_bits(batches(plain, 3, change=close_plain), kept)


@pytest.mark.slow
def test_an_attribute_that_the_call_reads_begins_a_new_cache() -> None:
    data, plain = Pair(), Pair()
    staged = stoker.Staged(data)

    def grow(epoch: int) -> None:
        data.scale = plain.scale = 1 + epoch

    with pytest.warns(stoker.StokerWarning, match="scale"):
        kept = batches(staged, 3, change=grow)
    assert equal_bits(batches(plain, 3, change=grow), kept)


class Bonus(Samples):
    """A method reads what the script changes in each epoch; what it calls does not."""

    bonus = 0

    def load(self, i: int) -> Any:
        return slow_array(self.numbers[i]), self.bonus

    def __getitem__(self, i: int) -> Any:
        return self.load(random.randrange(len(self)))


@pytest.mark.slow
def test_what_the_script_changes_in_each_epoch_is_read_by_no_kept_call() -> None:
    data, plain = Bonus(), Bonus()
    staged = stoker.Staged(data)

    def change(epoch: int) -> None:
        data.bonus = plain.bonus = epoch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        kept = batches(staged, 5, change=change)
    assert equal_bits(batches(plain, 5, change=change), kept)
    # fewer, if the other function was found sooner: which one saves more is measured
    assert sum("bonus was" in str(w.message) for w in said) <= 2
    assert "slow_array" in str(staged.split)


class Counts(Pair):
    """Loading changes the dataset."""

    def load_image(self, i: int) -> Any:
        self.loads += 1
        return super().load_image(i) + (self.loads > 10)


class Draws(Pair):
    """Loading draws, for some samples."""

    def load_image(self, i: int) -> Any:
        image = super().load_image(i)
        return image + torch.rand(()) if i % 3 == 0 else image


class Same(Pair):
    """Each call gives the same object."""

    def __init__(self) -> None:
        super().__init__()
        self.all = [super(Same, self).load_image(i) for i in range(SIZE)]

    def load_image(self, i: int) -> Any:
        slow_array(i)
        return self.all[i]


class Reader:
    def __init__(self, bonus: int) -> None:
        self.bonus = bonus

    def load(self, i: int) -> Any:
        return torch.from_numpy(slow_array(i)) + self.bonus


class OfReader(Samples):
    """What loads is another object, of no dataset's class."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = Reader(0)

    def __getitem__(self, i: int) -> Any:
        return self.reader.load(random.randrange(len(self))), i


class NewReader(OfReader):
    """A new one may have the address of the one before."""

    def __getitem__(self, i: int) -> Any:
        self.reader = Reader(random.randrange(5))
        return super().__getitem__(i)


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "shown"), [(OfReader, "self.reader.load"), (NewReader, "slow_array")])
def test_calls_of_an_object_that_the_dataset_holds(kind: Any, shown: str) -> None:
    staged = stoker.Staged(kind())
    assert shown in str(staged.split)
    assert ("self.reader.load" in str(staged.split)) == (kind is OfReader)
    assert equal_bits(batches(kind()), batches(staged))


class Clock(Pair):
    def load_image(self, i: int) -> Any:
        time.sleep(0.002)
        return torch.full((2,), time.perf_counter())


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Counts, Same])
def test_of_a_call_that_is_not_pure_only_the_pure_calls_inside_are_kept(kind: Any) -> None:
    staged = stoker.Staged(kind())
    assert staged.split is not None
    assert "self.load_image" not in str(staged.split)
    assert equal_bits(batches(kind()), batches(staged))


def test_what_is_pure_nowhere_says_why() -> None:
    with pytest.raises(stoker.StokerError, match=r"cannot be split.*asks time"):
        stoker.split(Clock())


@pytest.mark.slow
def test_a_call_that_draws_for_some_arguments_is_kept_for_the_others() -> None:
    try:
        staged = stoker.Staged(Draws())
    except stoker.StokerError:
        return  # the trial met one of those that draw
    assert equal_bits(batches(Draws()), batches(staged))


def test_keys() -> None:
    data = Samples()
    names = names_of(data)
    key = call_key(Call(data.load_image, (3,), {}), names)
    assert key == call_key(Call(data.load_image, (3,), {}), names)
    assert key != call_key(Call(data.load_image, (True,), {}), names) or repr(3) != repr(True)
    assert call_key(Call(data.load_image, (torch.zeros(2),), {}), names) is None
    assert call_key(Call(Samples().load_image, (3,), {}), names) is None
    assert not is_small(("x" * 100_000,))
    assert is_small(("x" * 2000, np.int64(3), b"", None))
    assert not is_small(type("Marked", (str,), {})("x"))  # it may have attributes


def test_a_table_gives_each_key_a_number_of_its_own_until_it_is_full() -> None:
    table = Table(64)
    numbers = [table.find(("a", k), claim=True) for k in range(48)]
    assert len(set(numbers)) == 48
    assert [table.find(("a", k), claim=False) for k in range(48)] == numbers
    assert table.find(("b", 1), claim=True) == -1
    assert table.find(("b", 1), claim=False) == -1


# ------------------------------------------------------------------------- variables, with blocks, containers


class Flip:
    def __call__(self, x: Any) -> Any:
        return x.flip(0) if random.random() < 0.5 else x


class Chain:
    def __init__(self, *steps: Any) -> None:
        self.steps = list(steps)

    def __call__(self, x: Any) -> Any:
        for step in self.steps:
            x = step(x)
        return x


class Shift:
    by = 0

    def __call__(self, x: Any) -> Any:
        return torch.from_numpy(slow_array(int(x.sum()) % 7)) + self.by


SHIFT_AND_FLIP = Chain(Shift(), Flip())


class Resized(Samples):
    """Progressive resizing: the script changes a transform of a container."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = Chain(Shift(), Flip())

    def shift(self, by: int) -> None:
        self.transform.steps[0].by = by

    def __getitem__(self, i: int) -> Any:
        other = random.randrange(len(self))
        return self.transform(self.load_image(other)), self.transform(self.load_image(i))


class ResizedGlobally(Samples):
    def shift(self, by: int) -> None:
        SHIFT_AND_FLIP.steps[0].by = by

    def __getitem__(self, i: int) -> Any:
        return SHIFT_AND_FLIP(self.load_image(random.randrange(len(self))))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Resized, ResizedGlobally])
def test_a_transform_that_the_script_changes_is_run_anew(kind: Any) -> None:
    found = []
    for data in (kind(), kind()):
        data.shift(0)
        loaded = stoker.Staged(data) if found else data
        if found:
            assert "up to 1 of 2 transforms" in str(loaded.split)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(batches(loaded, change=data.shift))
    assert equal_bits(*found)


class Unbound(Samples):
    """A variable that the call mentions is set for some samples only."""

    def __getitem__(self, i: int) -> Any:
        other = random.randrange(len(self))
        if i % 2:
            number = i // 2
        return slow_array(number if i % 2 else 7).repeat(2, axis=0), self.load_image(other)


def shown_calls(data: Any) -> str:
    """What is kept of a dataset's calls, whose batches are compared."""
    staged = stoker.Staged(data())
    assert staged.split is not None
    assert staged.split.memo is not None, staged.split
    assert equal_bits(batches(data()), batches(staged))
    return " ".join(staged.split.memo.root.all_shown())


class SometimesScaled(Samples):
    def scaled(self, number: int) -> Any:
        return slow_array(number) * self.scale

    def __getitem__(self, i: int) -> Any:
        if random.random() > 0.8:
            return self.scaled(self.numbers[random.randrange(len(self))])
        return slow_array(self.numbers[i])


@pytest.mark.slow
def test_what_a_call_reads_in_a_branch_that_is_seldom_taken_is_known() -> None:
    """A call is kept only if the check made it: else a change of what it reads would not be noticed."""
    plain, kept = SometimesScaled(), SometimesScaled()
    staged = stoker.Staged(kept)
    for scale in (1, 2, 5):
        plain.scale = kept.scale = scale
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert equal_bits(batches(plain), batches(staged))


class Around(Dataset[Any]):
    """Its samples are another dataset's, asked for after a draw."""

    def __init__(self) -> None:
        self.inner = SometimesScaled()

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, i: int) -> Any:
        shift = random.randrange(3)
        return self.inner.scaled(self.inner.numbers[i]) + shift, self.inner.load_image(i)


@pytest.mark.slow
def test_what_a_call_of_another_object_reads_is_compared_there() -> None:
    def change(data: Any) -> Any:
        return lambda epoch: setattr(data.inner, "scale", 1 + epoch)

    plain, kept = Around(), Around()
    staged = stoker.Staged(kept)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert equal_bits(batches(plain, change=change(plain)), batches(staged, change=change(kept)))


class Grows(SometimesScaled):
    """Each sample changes what the next one's call reads."""

    def __getitem__(self, i: int) -> Any:
        j = random.randrange(len(self))
        self.scale = i % 5
        return self.scaled(self.numbers[j]), self.load_image(i)


class GrowsOnce(SometimesScaled):
    """So does one that no trial sees."""

    def __getitem__(self, i: int) -> Any:
        j = random.randrange(len(self))
        if i == 17:
            self.scale += 3
        return self.scaled(self.numbers[j]), slow_array(self.numbers[i])


class GrowsAfterwards(SometimesScaled):
    """The same where samples are cut."""

    def __getitem__(self, i: int) -> Any:
        image = self.scaled(self.numbers[i])
        if random.random() < 2 and i == 17:
            self.scale += 3
        return image, slow_array(self.numbers[i])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Grows, GrowsOnce, GrowsAfterwards])
def test_what_loading_a_sample_may_change_is_read_by_nothing_that_is_kept(kind: Any) -> None:
    staged = stoker.Staged(kind())
    assert "scaled(" not in str(staged.split)
    assert equal_bits(batches(kind()), batches(staged))


@pytest.mark.slow
def test_a_variable_that_is_not_set_ends_nothing() -> None:
    assert "slow_array(number" in shown_calls(Unbound)


def function(body: str) -> ast.FunctionDef:
    tree = ast.parse(f"def f(self, p, q):\n{textwrap.indent(textwrap.dedent(body), '    ')}")
    return cast(ast.FunctionDef, tree.body[0])


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("y = b(a(self.z[random.randrange(9)]))", "_drawn_2 = self.z[random.randrange(9)]\ny = b(a(_drawn_2))"),
        ("if p:\n    y = b(p.name)", "if p:\n    p.name = p.name\n    y = b(p.name)"),
        ("y = b(g(), a(self.z[random.randrange(9)]))", "y = b(g(), a(self.z[random.randrange(9)]))"),
        ("y = a(random.random()), locals()", "y = (a(random.random()), locals())"),
    ],
    ids=["drawn", "a part", "after another call", "locals"],
)
def test_arguments_that_get_variables(body: str, expected: str) -> None:
    made = arguments_before_calls(function(body)).body
    assert "\n".join(map(ast.unparse, made)) == expected


def test_what_a_method_assigns_to() -> None:
    body = """
    global SEEN
    if self.file is None:
        self.file = open(self.path)
    with self.lock:
        if i == 7:
            self.scale = self.base
    self.images[i] = other.size = 1
    self.counts[i]["a"] += 1
    del self.last
    index = self.first
    index += 1
    if i == 8:
        row = self.table[i]
        row["n"] += 1
    """
    assert attributes_assigned(function(body), "self") == {"SEEN", "scale", "counts", "last", "table"}
