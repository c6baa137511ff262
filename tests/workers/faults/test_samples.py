"""Samples that fail: what stands in their place, that nothing but the seed decides it, the bound, and the list."""

from __future__ import annotations

import gc
import itertools
import json
import os
import stat
import warnings
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, SubsetRandomSampler, TensorDataset

import stoker
from stoker.core.dataset_tree import file_of
from stoker.core.errors import SampleError, StokerWarning, UsageError
from stoker.loader.loader_state import state_of
from stoker.workers.faults.error_log import bound, quarantine
from stoker.workers.faults.policy import Failure
from tests.helpers import own_generator

SEED = int(os.environ.get("STOKER_SEED", "0"))
KINDS: dict[str, dict[str, Any]] = {
    "inline": {},
    "two": {"num_workers": 2},
    "auto": {"num_workers": "auto"},
    "threads": {"num_workers": 2, "worker_method": "thread"},
}
EACH = [pytest.param(k, marks=pytest.mark.slow) if k == "auto" else k for k in KINDS]  # it measures first
pytestmark = pytest.mark.filterwarnings("ignore::stoker.core.errors.StokerWarning")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Flawed(Dataset):
    """Index and a random number; some samples raise, after they have drawn."""

    def __init__(self, bad: set[int], n: int = 60) -> None:
        self.bad, self.n = bad, n
        self.files = [f"{i}.jpg" for i in range(n)]

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> torch.Tensor:
        drawn = torch.rand((), generator=own_generator())
        if i in self.bad:
            raise ValueError(f"sample {i} is\nbroken")
        return torch.stack([torch.tensor(float(i)), drawn])


class Batched(Flawed):
    """Makes whole batches; and says how often it is asked for one sample."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[i] for i in indices]


def rows(loader: Any, seed: int = 3) -> list[list[int]]:
    torch.manual_seed(seed)
    return [batch[:, 0].int().tolist() for batch in loader]


def bits(loader: Any, seed: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [batch.clone() for batch in loader]


BAD = {1, 7, 20, 21, 22, 23, 59}


@pytest.mark.few(3)
@pytest.mark.parametrize("dataset", [Flawed, Batched])
@pytest.mark.parametrize("kind", KINDS)
def test_skip_leaves_out_what_failed_and_nothing_else(kind: str, dataset: Any) -> None:
    found = rows(stoker.DataLoader(dataset(BAD), batch_size=4, on_error="skip", **KINDS[kind]))
    whole = [[i for i in range(k, k + 4) if i not in BAD] for k in range(0, 60, 4)]
    assert found == [batch for batch in whole if batch]  # the batch of which nothing is left is not there


@pytest.mark.few(3)
@pytest.mark.parametrize("dataset", [Flawed, Batched])
@pytest.mark.parametrize("kind", EACH)
def test_refill_keeps_the_size_with_samples_of_the_same_batch(kind: str, dataset: Any) -> None:
    found = rows(stoker.DataLoader(dataset(BAD), batch_size=4, on_error="skip", refill=True, **KINDS[kind]))
    at = [k for k in range(0, 60, 4) if k != 20]
    assert len(found) == len(at)
    for k, batch in zip(at, found, strict=True):
        good = set(range(k, k + 4)) - BAD
        assert len(batch) == 4
        assert set(batch) == good
        assert [i for i, want in zip(batch, range(k, k + 4), strict=True) if want in good] == sorted(good)


@pytest.mark.few(3)
@pytest.mark.parametrize("dataset", [Flawed, Batched])
@pytest.mark.parametrize("kind", KINDS)
def test_replace_keeps_places_and_takes_good_samples(kind: str, dataset: Any) -> None:
    found = rows(stoker.DataLoader(dataset(BAD), batch_size=4, on_error="replace", **KINDS[kind]))
    assert [len(batch) for batch in found] == [4] * 15
    for want, got in zip(range(60), itertools.chain(*found), strict=True):
        assert got not in BAD
        assert got == want or want in BAD


@pytest.mark.slow
@pytest.mark.parametrize("policy", [{"on_error": "skip", "refill": True}, {"on_error": "replace"}], ids=str)
def test_what_stands_in_does_not_depend_on_the_count_or_kind_of_workers(policy: dict[str, Any]) -> None:
    print(f"STOKER_SEED={SEED}")
    orders = {}
    for name, kw in {**KINDS, "three": {"num_workers": 3}}.items():
        generator = torch.Generator().manual_seed(SEED)  # without workers the samples draw from the default one
        loader = stoker.DataLoader(Flawed(BAD), batch_size=4, shuffle=True, generator=generator, **policy, **kw)
        orders[name] = [[batch[:, 0].int().tolist() for batch in loader] for _ in range(2)]
    assert all(order == orders["inline"] for order in orders.values())
    assert orders["inline"][0] != orders["inline"][1]


@pytest.mark.few(1)
@pytest.mark.parametrize("dataset", [Flawed, Batched])
@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_with_task_seeds_no_bit_depends_on_the_count(policy: str, dataset: Any) -> None:
    found = []
    for n in (1, 2, 3):
        loader = stoker.DataLoader(dataset(BAD), batch_size=4, shuffle=True, num_workers="auto", on_error=policy)
        loader.resize(n)
        found.append(bits(loader))
    for other in found[1:]:
        assert len(other) == len(found[0])
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_with_task_seeds_a_batch_that_failed_begins_anew() -> None:
    """A dataset that makes whole batches gives the bits of one that does not."""
    one, many = (
        bits(stoker.DataLoader(dataset(BAD), batch_size=4, shuffle=True, num_workers="auto", on_error="skip"))
        for dataset in (Flawed, Batched)
    )
    assert all(torch.equal(a, b) for a, b in zip(one, many, strict=True))


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_dataset_without_a_flaw_gives_the_same_bits_under_any_policy(kind: str) -> None:
    for dataset in (Flawed(set()), Batched(set()), TensorDataset(torch.arange(60.0).view(-1, 2))):
        plain = bits_of(stoker.DataLoader(dataset, batch_size=4, shuffle=True, **KINDS[kind]))
        for policy in ("skip", "replace", lambda i, e: None):
            mine = bits_of(stoker.DataLoader(dataset, batch_size=4, shuffle=True, on_error=policy, **KINDS[kind]))
            assert all(torch.equal(a, b) for a, b in zip(plain, mine, strict=True))


def bits_of(loader: Any) -> list[torch.Tensor]:
    torch.manual_seed(3)
    return [(b if isinstance(b, torch.Tensor) else b[0]).clone() for b in loader]


@pytest.mark.parametrize("kind", EACH)
def test_a_function_says_what_stands_there(kind: str) -> None:
    seen = []

    def stand_in(index: int, error: Exception) -> torch.Tensor | None:
        seen.append((index, type(error)))
        return None if index % 2 else torch.tensor([-1.0 * index, 0.0])

    found = rows(stoker.DataLoader(Flawed(BAD), batch_size=4, on_error=stand_in, **KINDS[kind]))
    assert found[0] == [0, 2, 3]
    assert found[5] == [-20, -22]
    if kind == "inline":
        assert seen[0] == (1, ValueError)


def _refuses(index: int, error: Exception) -> None:
    raise LookupError(f"{index} is needed") from error


@pytest.mark.parametrize("kind", EACH)
def test_a_function_that_raises_ends_it(kind: str) -> None:
    with pytest.raises(LookupError, match="1 is needed"):
        rows(stoker.DataLoader(Flawed({1}), batch_size=4, on_error=_refuses, **KINDS[kind]))


@pytest.mark.parametrize("kind", EACH)
def test_single_samples_are_left_out_or_replaced(kind: str) -> None:
    data = Flawed({0, 3}, n=6)
    torch.manual_seed(1)
    skipped = [int(x[0]) for x in stoker.DataLoader(data, batch_size=None, on_error="skip", **KINDS[kind])]
    assert skipped == [1, 2, 4, 5]
    replaced = [int(x[0]) for x in stoker.DataLoader(data, batch_size=None, on_error="replace", **KINDS[kind])]
    assert len(replaced) == 6
    assert not {0, 3} & set(replaced)


def test_a_replacement_is_one_that_the_sampler_might_have_drawn() -> None:
    mine = list(range(0, 60, 3))
    for n in range(20):
        loader = stoker.DataLoader(Flawed({0, 30, 57}), 4, sampler=SubsetRandomSampler(mine), on_error="replace")
        assert set(itertools.chain(*rows(loader, n))) <= set(mine)
    batches = [[0, 3, 6], [9, 12, 15], [57, 33, 36]]  # nobody knows what else a batch sampler might draw
    loader = stoker.DataLoader(Flawed({0, 12, 57}), batch_sampler=batches, on_error="replace")
    found = rows(loader)
    assert [set(b) for b in found] == [{3, 6}, {9, 15}, {33, 36}]
    assert [len(b) for b in found] == [3, 3, 3]


@pytest.mark.parametrize("kind", EACH)
def test_torchs_way_stays_torchs(kind: str) -> None:
    """Without a policy the same exception at the same batch, and the iteration goes on after it."""
    it = iter(stoker.DataLoader(Flawed({5}), batch_size=4, **KINDS[kind]))
    next(it)
    with pytest.raises(ValueError, match="sample 5 is"):
        next(it)
    assert next(it)[:, 0].int().tolist() == [8, 9, 10, 11]


@pytest.mark.parametrize("kind", EACH)
def test_what_is_no_samples_fault_is_raised(kind: str) -> None:
    class Ragged(Flawed):
        def __getitem__(self, i: int) -> torch.Tensor:
            return torch.zeros(1 + i % 2)

    for dataset in (Ragged(set()), type("RaggedBatches", (Ragged, Batched), {})(set())):
        with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
            next(iter(stoker.DataLoader(dataset, batch_size=4, on_error="skip", **KINDS[kind])))


def test_a_gather_and_a_subset_of_it_fall_back() -> None:
    """An index out of range in a table is one sample's fault, not the batch's."""
    table = TensorDataset(torch.arange(10.0))
    for dataset in (table, Subset(table, list(range(10)))):
        loader = stoker.DataLoader(
            dataset, batch_sampler=[[0, 1], [2, 3], [4, 99], [5, 6]], num_workers=1, on_error="skip"
        )
        assert [b[0].tolist() for b in loader] == [[0, 1], [2, 3], [4], [5, 6]]


Point = namedtuple("Point", "x y")


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["two", "auto", "threads"])
def test_a_shortened_batch_is_as_whole_as_any(kind: str) -> None:
    """Large enough for a slot: writable, its own, alive as long as it is held."""

    class Large(Flawed):
        def __getitem__(self, i: int) -> Any:
            super().__getitem__(i)
            return Point({"a": torch.full((5000,), float(i))}, [str(i)])

    held = list(stoker.DataLoader(Large(BAD), batch_size=4, on_error="skip", **KINDS[kind]))
    gc.collect()
    for batch in held:
        assert type(batch) is Point
        assert batch.x["a"][:, 0].tolist() == [float(i) for i in batch.y[0]]
        batch.x["a"].add_(1)


@pytest.mark.slow
def test_a_staged_dataset(tmp_path: Path) -> None:
    def prepare(i: int) -> torch.Tensor:
        if i in BAD:
            raise ValueError(i)
        return torch.tensor([float(i)])

    for kind, augment in itertools.product(("inline", "two"), (None, lambda x: x + torch.rand(()) * 0.5)):
        staged = stoker.Staged(list(range(60)), prepare=prepare, augment=augment)
        subset = Subset(staged, list(range(59, -1, -1)))
        for dataset, numbers in ((staged, range(60)), (subset, range(59, -1, -1))):
            loader = stoker.DataLoader(dataset, batch_size=4, on_error="skip", **KINDS[kind])
            for _ in range(2):  # the second from the cache
                found = list(itertools.chain(*rows(loader)))
                assert found == [i for i in numbers if i not in BAD]
        assert staged.account.filled == 60 - len(BAD)
    batches = stoker.Staged(list(range(60)), prepare=prepare, augment_batch=lambda b: -b)
    for kind in ("inline", "two"):
        found = list(itertools.chain(*rows(stoker.DataLoader(batches, batch_size=4, on_error="skip", **KINDS[kind]))))
        assert found == [-i for i in range(60) if i not in BAD]


# -- the bound


@pytest.mark.parametrize("kind", EACH)
def test_too_many_are_an_error_at_the_same_batch_everywhere(kind: str) -> None:
    loader = stoker.DataLoader(Flawed(BAD), batch_size=4, on_error="skip", max_errors=5, **KINDS[kind])
    it = iter(loader)
    assert [next(it)[:, 0].int().tolist()[0] for _ in range(5)] == [0, 4, 8, 12, 16]
    with pytest.raises(SampleError) as e:
        next(it)
    assert "6 samples of 60 could not be loaded, and max_errors allows 5 (6 ValueError)" in str(e.value)
    assert "sample 1 (1.jpg): ValueError: sample 1 is broken; sample 7 (7.jpg)" in str(e.value)
    assert [f.index for f in e.value.failures] == [1, 7, 20, 21, 22, 23]


def test_a_sample_counts_once_in_all_epochs() -> None:
    loader = stoker.DataLoader(Flawed({1, 2}), batch_size=4, on_error="skip", max_errors=2)
    for _ in range(5):
        assert len(list(loader)) == 15
    assert len(state_of(loader).ledger.failed) == 2


def test_the_default_bound_is_one_per_cent_and_ten() -> None:
    assert (bound(None, 50), bound(None, 100_000), bound(None, None), bound(0.1, 50), bound(0, 50)) == (
        10,
        1000,
        10,
        5,
        0,
    )
    with pytest.raises(SampleError, match="11 samples of 60"):
        list(stoker.DataLoader(Flawed(set(range(11))), batch_size=4, on_error="skip"))


def test_no_good_sample_is_an_error_that_says_so() -> None:
    with pytest.raises(SampleError, match="failed, and so did 32 replacements"):
        list(stoker.DataLoader(Flawed(set(range(60))), batch_size=4, on_error="replace", max_errors=100))


def test_it_is_said_once(recwarn: pytest.WarningsRecorder) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        list(stoker.DataLoader(Flawed(BAD), batch_size=4, on_error="skip", num_workers=2))
    said = [str(w.message) for w in recwarn if issubclass(w.category, StokerWarning)]
    assert len(said) == 1
    assert "sample 1 (1.jpg) could not be loaded" in said[0]
    assert "Up to 10 samples may fail" in said[0]


# -- the list


def test_the_list_is_private_and_complete(tmp_path: Path) -> None:
    path = tmp_path / "stoker-quarantine.jsonl"
    path.touch(mode=0o644)
    loader = stoker.DataLoader(Flawed(BAD), batch_size=4, on_error="skip", num_workers=2)
    for _ in range(2):
        list(loader)
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert [e["index"] for e in entries] == sorted(BAD)
    assert entries[0]["file"] == "1.jpg"
    assert entries[0]["error"] == "ValueError: sample 1 is broken"
    assert entries[0]["kind"] == "error"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_no_list_is_made_where_nothing_fails_or_none_is_wanted(tmp_path: Path) -> None:
    list(stoker.DataLoader(Flawed(set()), batch_size=4, on_error="skip"))
    list(stoker.DataLoader(Flawed(BAD), batch_size=4, on_error="skip", quarantine=None))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["link", "folder", "pipe", "no folder"])
def test_a_list_that_cannot_be_written_is_said_and_costs_nothing(tmp_path: Path, what: str) -> None:
    path = tmp_path / "list"
    if what == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path = tmp_path / "no" / "list"
    with pytest.warns(StokerWarning, match="failed samples are not recorded in the quarantine file"):
        found = rows(stoker.DataLoader(Flawed({1}), batch_size=4, on_error="skip", quarantine=path))
    assert len(found) == 15
    assert not (tmp_path / "elsewhere").exists()


def test_lines_of_many_processes_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "list"
    running = []
    for k in range(3):
        running.append(os.fork())
        if not running[-1]:
            try:
                for i in range(200):
                    quarantine(path, [Failure(i, "f" * 1500, "e" * 300)], str(k))
            finally:
                os._exit(0)
    for pid in running:
        assert os.waitpid(pid, 0) == (pid, 0)
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    for k in range(3):
        assert [e["index"] for e in entries if e["dataset"] == str(k)] == list(range(200))


# -- names, settings


def test_files_are_found_inside_other_datasets() -> None:
    photos = Flawed(set(), 5)
    both = ConcatDataset([Flawed(set(), 3), Subset(photos, [4, 2])])
    assert [file_of(both, i) for i in (0, 2, 3, 4, -1)] == ["0.jpg", "2.jpg", "4.jpg", "2.jpg", "2.jpg"]
    assert file_of(stoker.Staged(photos, prepare=lambda x: x, cache=None), 3) == "3.jpg"
    assert file_of(stoker.Staged(["a", "b"], prepare=len, cache=None), 1) == "b"
    assert file_of([1, 2], 1) == ""
    assert file_of(photos, "k") == ""


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(4))


@pytest.mark.parametrize(
    ("kw", "words"),
    [
        ({"on_error": "ignore"}, "on_error must be one of 'raise', 'skip', 'replace', or a function, not 'ignore'"),
        ({"on_error": 3}, "or a function, not 3"),
        ({"refill": True}, "refill=True"),
        ({"refill": True, "on_error": "replace"}, "refill=True"),
        ({"on_error": "skip", "max_errors": -1}, "max_errors must be .*, not -1"),
        ({"on_error": "skip", "max_errors": 1.0}, r"max_errors must be .*, not 1\.0"),
        ({"on_error": "skip", "max_errors": True}, "max_errors must be .*, not True"),
        ({"on_error": "skip", "batch_size": None, "refill": True}, "makes no batches"),
        ({"on_error": "replace", "batch_size": None, "sampler": iter([])}, "one of torch's own samplers"),
    ],
)
def test_settings_that_are_none_say_what_to_do(kw: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        stoker.DataLoader(Flawed(set()), **kw)


@pytest.mark.parametrize("on_error", ["skip", "replace", lambda i, e: None])
def test_a_stream_cannot_go_on_and_says_so(on_error: Any) -> None:
    with pytest.raises(UsageError, match="needs a map-style dataset, because an iterator ends when it raises"):
        stoker.DataLoader(Stream(), on_error=on_error)


def test_a_loader_built_again_from_its_attributes_keeps_the_policy() -> None:
    """As Lightning does it."""
    loader = stoker.DataLoader(Flawed(BAD), batch_size=4, on_error="replace", max_errors=9, quarantine=None)
    names = set(stoker.DataLoader.__init__.__code__.co_varnames) & set(vars(loader))
    same = {k: v for k, v in vars(loader).items() if k in names and k not in ("batch_sampler",)}
    again = stoker.DataLoader(**{**same, "batch_sampler": None})
    assert (again.on_error, again.max_errors, again.quarantine) == ("replace", 9, None)
    assert rows(again) == rows(loader)


def test_debug_shows_the_error_itself() -> None:
    with pytest.raises(ValueError, match="sample 1 is"):
        list(stoker.DataLoader(Flawed({1}), on_error="skip", debug=True))


def test_counts_are_in_the_report() -> None:
    with stoker.watch() as w:
        loader = stoker.DataLoader(Flawed(BAD), batch_size=4, on_error="skip", num_workers=2)
        list(loader)
    assert w.report is not None
    faults = w.report["loaders"][0]["faults"]
    assert faults["samples"] == len(BAD)
    assert faults["first"][0]["index"] == 1
    assert faults["quarantine"].endswith("stoker-quarantine.jsonl")
    assert "7 samples could not be loaded; the first, sample 1 (1.jpg): ValueError" in " ".join(str(w).split())


def test_inline_under_the_watch_the_policy_stays(tmp_path: Path) -> None:
    """Which takes its hands off the fetcher while tasks are short."""
    with stoker.watch():
        for dataset in (Flawed({900}, 1000), Batched({900}, 1000)):
            found = rows(stoker.DataLoader(dataset, batch_size=2, on_error="skip"))
            assert found[450] == [901]


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class Muted(Flawed):
    def __getitem__(self, i: int) -> torch.Tensor:
        if i in self.bad:
            raise Mute
        return super().__getitem__(i)


@pytest.mark.parametrize("how", EACH)
def test_an_error_that_cannot_say_what_it_is(how: str) -> None:
    loader = stoker.DataLoader(Muted({3, 17}), batch_size=4, on_error="skip", max_errors=9, **KINDS[how])
    assert [i for row in rows(loader) for i in row] == [i for i in range(60) if i not in (3, 17)]
