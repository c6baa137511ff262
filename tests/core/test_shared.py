"""``stoker.share``, and what is noticed about a dataset: big lists, changes."""

from __future__ import annotations

import copy
import functools
import io
import os
import pickle
import random
import subprocess
import sys
import threading
import tracemalloc
import warnings
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

import stoker
from stoker.core import resources
from stoker.core.big_objects import big
from stoker.core.errors import StokerWarning, UsageError
from stoker.core.fingerprint import Fingerprint
from stoker.loader.loader_state import state_of

plain = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary())
items = st.recursive(
    plain, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3))
)


@settings(max_examples=12)
@given(st.lists(items, max_size=12), st.data())
def test_a_list_is_as_it_was(original: list[Any], data: Any) -> None:
    shared = stoker.share(original)
    assert shared == original
    assert list(shared) == original
    assert [type(x) for x in shared] == [type(x) for x in original]
    assert len(shared) == len(original)
    part = data.draw(st.slices(len(original)))
    assert list(shared[part]) == original[part]
    assert list(shared[part][::-1]) == original[part][::-1]
    for i in range(-len(original), len(original)):
        assert shared[i] == original[i]
    for i in (len(original), -len(original) - 1):
        with pytest.raises(IndexError):
            shared[i]


@settings(max_examples=10)
@given(
    st.lists(
        st.fixed_dictionaries({"path": st.text(), "label": st.integers(), "box": st.tuples(st.floats(0, 1))}),
        min_size=1,
    )
)
def test_rows_of_one_look(original: list[Any]) -> None:
    shared = stoker.share(original)
    assert shared == original
    assert list(shared[0]) == list(original[0])


def test_any_integer_is_an_index() -> None:
    shared = stoker.share(["a", "b"])
    assert shared[np.int64(1)] == shared[torch.tensor(1)] == "b"
    with pytest.raises(TypeError):
        shared["a"]
    with pytest.raises(TypeError):
        shared[0] = "c"  # type: ignore[index]


def test_copies_are_the_same_memory_and_pickles_are_not() -> None:
    rows = [{"a": i} for i in range(100)]
    shared = stoker.share(rows)
    assert copy.deepcopy(shared) is shared
    assert stoker.share(shared) is shared
    for _ in range(2):
        other = pickle.loads(pickle.dumps(shared[10:20]))
        assert other == rows[10:20]


def test_what_comes_out_is_nobody_elses() -> None:
    shared = stoker.share([{"a": [1]}])
    shared[0]["a"].append(2)
    assert shared[0] == {"a": [1]}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (5, "not int"),
        (None, "not NoneType: None"),
        ({"cat": [1]}, r"not dict: share\(list\(d.items\(\)\)\) gives a list of pairs"),
        ([{"cat": [1]}, {"cat": lambda: 1}], r"item 1\['cat'\] \(function\) cannot be shared"),
        ("text", "not str"),
        (np.zeros(3), "one block already"),
        (torch.zeros(3), "one block already"),
        ({1, 2}, "a set has no order"),
        ((i for i in range(3)), r"share\(list"),
        ([1, io.StringIO(), lambda: 1], r"item 2 \(function\) cannot be shared"),
    ],
)
def test_what_cannot_be_shared(wrong: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        stoker.share(wrong)


class Rows(Dataset):
    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> int:
        return int(self.rows[i]["y"])


class Mapped(Rows):
    """Each row, and whether the process that reads it has the shared block in its address space."""

    def __getitem__(self, i: int) -> tuple[int, bool]:  # type: ignore[override]
        return super().__getitem__(i), i % 1000 != 0 or "memfd:stoker-share" in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_read_the_same_memory(context: str) -> None:
    n = 20_000
    shared = stoker.share([{"p": f"img/{i:08d}.jpg", "y": i} for i in range(n)])
    loader = stoker.DataLoader(
        Mapped(shared), batch_size=200, num_workers=2, shuffle=True, multiprocessing_context=context
    )
    seen, mapped = zip(*loader, strict=True)
    assert torch.cat(seen).sort().values.equal(torch.arange(n))
    assert torch.cat(mapped).all()


@pytest.mark.slow
def test_workers_weigh_themselves() -> None:
    loader = stoker.DataLoader(Rows([{"y": i} for i in range(4000)]), batch_size=1, num_workers=2)
    while len(state_of(loader).metrics.worker_pss) < 2:
        for _ in loader:
            pass
    pss = state_of(loader).metrics.worker_pss
    assert set(pss) == {0, 1}
    assert all(1 << 20 < n < resources.memory_granted() for n in pss.values())
    assert resources.pss() > 1 << 20
    assert resources.pss(1 << 30) == 0


# ----------------------------------------------------------------------------------------------------------- big lists


def test_a_list_that_fork_copies_is_named_once() -> None:
    class Inner:
        def __init__(self) -> None:
            self.samples = [{"path": f"{i}.jpg", "label": i} for i in range(200_000)]

    dataset = Rows([{"y": 0}] * 4)
    dataset.index = Inner()  # type: ignore[attr-defined]
    loader = stoker.DataLoader(dataset, num_workers=1)
    with pytest.warns(StokerWarning) as caught:
        [list(loader) for _ in range(2)]
    words = [str(w.message) for w in caught if w.category is StokerWarning]
    assert len(words) == 1
    assert words[0].startswith("dataset.index.samples is a list of 200,000 dicts, about ")
    assert "dataset.index.samples = stoker.share(dataset.index.samples)" in words[0]


def test_what_fork_does_not_copy_is_not_named() -> None:
    dataset = Rows(stoker.share([{"y": i} for i in range(300_000)]))
    dataset.table = np.zeros((1000, 1000))  # type: ignore[attr-defined]
    dataset.tensors = [torch.zeros(1000) for _ in range(100)]  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("error", StokerWarning)
        next(iter(stoker.DataLoader(dataset, num_workers=1)))
        kw: dict[str, Any] = {"num_workers": 1, "worker_method": "thread"}
        next(iter(stoker.DataLoader(Rows([{"y": i} for i in range(300_000)]), **kw)))


def test_estimates_are_near_the_truth() -> None:
    tracemalloc.start()
    rows = [{"path": f"images/{i:09d}.jpg", "label": i + 1000} for i in range(20_000)]
    took, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    (found,) = big(Rows(rows), 1 << 20)
    assert found.path == "dataset.rows"
    assert 0.5 * took < found.nbytes < 2 * took


class Note:
    def __init__(self, i: int) -> None:
        self.boxes = [[float(i), float(j)] for j in range(4)]
        self.name = f"{i:06d}.jpg"


class Names(list[str]):
    pass


def named_objects(n: int) -> list[str]:
    return [f"a/path/to/{i:08d}.jpg" for i in range(n)]


BIGS: dict[str, Any] = {
    "defaultdict": lambda: defaultdict(list, {i: [i, i + 1] for i in range(1000, 21_000)}),
    "OrderedDict": lambda: OrderedDict((x, i) for i, x in enumerate(named_objects(20_000))),
    "deque": lambda: deque(named_objects(30_000)),
    "a list's subclass": lambda: Names(named_objects(30_000)),
    "an array of objects": lambda: np.array(named_objects(30_000), dtype=object),
    "middle-sized lists": lambda: {f"n{i}": named_objects(5000) for i in range(6)},
    "long lists in a few": lambda: [named_objects(30_000), 1],
    "annotations": lambda: [Note(i) for i in range(4000)],
    "a set": lambda: set(named_objects(30_000)),
    "a DataFrame": lambda: pytest.importorskip("pandas").DataFrame({"a": named_objects(30_000)}, dtype=object),
    "a Series": lambda: pytest.importorskip("pandas").Series(named_objects(30_000), dtype=object),
}


@pytest.mark.parametrize("kind", BIGS)
@pytest.mark.few(2)
def test_big_things_of_any_kind_are_named(kind: str) -> None:
    tracemalloc.start()
    try:
        made = BIGS[kind]()
        took, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    (found,) = big(Rows(made), 1 << 20)
    assert found.path == ("dataset.rows[0]" if kind == "long lists in a few" else "dataset.rows")
    assert 0.4 * took < found.nbytes < 2.5 * took
    shared = eval(found.remedy, {"stoker": stoker, "dataset": Rows(made)})
    assert len(shared) == len(made if kind != "long lists in a few" else made[0])


def test_what_is_deep_inside_or_of_the_class_is_found() -> None:
    class Of(Rows):
        table = named_objects(30_000)

    data: Any = Of([])
    for _ in range(4):
        data = torch.utils.data.Subset(data, range(3))
    assert [b.path for b in big(data, 1 << 20)] == ["dataset" + 4 * ".dataset" + ".table"]


@pytest.mark.parametrize(
    "labels", [[i % 7 for i in range(2_000_000)], [None] * 2_000_000, ["cat", "dog"] * 1_000_000, range(10**9)]
)
def test_the_same_few_objects_again_and_again_are_not_big(labels: Any) -> None:
    assert big(Rows(labels), 1 << 20) == []


def test_a_circle_ends() -> None:
    a, b = Rows([]), Rows([])
    a.other, b.other = b, a  # type: ignore[attr-defined]
    assert big(a, 1) == []
    assert Fingerprint(a).changed(a) == []


# ------------------------------------------------------------------------------------------------------------- changes


class Twice:
    def __call__(self, x: Any) -> Any:
        return x * 2


class Thrice(Twice):
    pass


@dataclass(slots=True)
class Config:
    size: int


def len_or_so(x: Any) -> Any:
    return x


def power(k: int) -> Any:
    return lambda x: x**k


class Epochs(Dataset):
    scale = 4

    def __init__(self) -> None:
        self.epoch = 0
        self.crop = {"size": 32}
        self.mask = torch.zeros(3)
        self.table = np.zeros(3)
        self.stage: Any = None
        self.transform = Twice()
        self.fn: Any = len_or_so
        self.bound = functools.partial(divmod, 2)
        self.closed: Any = None
        self.names = stoker.share(["a", "b"])
        self.dtype = torch.float32
        self.config = Config(4)
        self.file: Any = None
        self._size: int | None = None

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> int:
        return self.epoch

    @functools.cached_property
    def kinds(self) -> int:
        return 3


class Counting(torch.utils.data.IterableDataset):
    n = 3

    def __iter__(self) -> Any:
        return iter(range(self.n))


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_made_anew_see_the_dataset_as_it_is(context: str) -> None:
    dataset = Epochs()
    loader = stoker.DataLoader(dataset, num_workers=2, multiprocessing_context=context)
    for epoch in range(2):
        dataset.epoch = epoch
        assert [int(b) for b in loader] == [epoch] * 4


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: setattr(d, "epoch", 1), "dataset.epoch was 0 and is 1"),
        (lambda d: d.crop.update(size=64), r"dataset\.crop\['size'\] was 32 and is 64"),
        (lambda d: d.mask.fill_(1), r"dataset\.mask"),
        (lambda d: setattr(d, "mask", d.mask.int()), r"dataset\.mask"),
        (lambda d: setattr(d, "table", d.table.astype("int32")), r"dataset\.table"),
        (lambda d: setattr(d, "epoch", 0.5), r"dataset\.epoch was 0 and is 0\.5"),
        (lambda d: setattr(d, "epoch", (0, 1)), r"dataset\.epoch was 0 and is a tuple of 2"),
        (lambda d: setattr(d, "stage", 1), r"dataset\.stage was None and is 1"),
        (lambda d: setattr(d, "stage", Twice()), r"dataset\.stage was None and is a Twice"),
        (lambda d: setattr(d, "level", 2), r"dataset\.level is 2"),
        (lambda d: setattr(d, "transform", Thrice()), r"dataset\.transform was a Twice and is a Thrice"),
        (lambda d: setattr(d, "transform", None), r"dataset\.transform was a Twice and is None"),
        (lambda d: setattr(d, "fn", lambda x: x + 1), r"dataset\.fn"),
        (lambda d: setattr(d, "bound", functools.partial(divmod, 3)), r"dataset\.bound\.args"),
        (lambda d: setattr(d, "closed", power(3)), r"dataset\.closed\.k was 2 and is 3"),
        (lambda d: setattr(d, "dtype", torch.float16), r"dataset\.dtype was torch\.float32 and is torch\.float16"),
        (lambda d: setattr(d.config, "size", 5), r"dataset\.config\.size was 4 and is 5"),
        (lambda d: setattr(d, "names", stoker.share(["c"])), r"dataset\.names"),
        (lambda d: setattr(type(d), "scale", 5), r"dataset\.scale was 4 and is 5"),
    ],
)
def test_a_change_that_persistent_workers_do_not_see_is_said_once(change: Any, words: str) -> None:
    dataset = Epochs()
    dataset.closed = power(2)
    loader = stoker.DataLoader(dataset, num_workers=1, persistent_workers=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", StokerWarning)
        for _ in range(2):
            list(loader)
    try:
        change(dataset)
        with pytest.warns(StokerWarning, match=words) as caught:
            [list(loader) for _ in range(3)]
    finally:
        Epochs.scale = 4
    assert len([w for w in caught if w.category is StokerWarning]) == 1


def test_what_the_parent_made_for_itself_is_no_change() -> None:
    """Opened, or worked out, where it was first asked for."""
    dataset: Any = Epochs()
    dataset.random, dataset.lock = random.Random(0), threading.Lock()
    look = Fingerprint(dataset)
    dataset.random.gauss(0, 1)
    with open(__file__) as dataset.file:
        dataset._size, dataset._more = 5, {"a": 1}
        assert dataset.kinds == 3
        dataset.mask = dataset.mask.clone()
        assert look.changed(dataset) == []


def test_copies_of_an_iterable_dataset_in_threads_that_stay() -> None:
    dataset = Counting()
    loader = stoker.DataLoader(dataset, num_workers=1, persistent_workers=True, worker_method="thread")
    assert [int(b) for b in loader] == [0, 1, 2]
    dataset.n = 2
    with pytest.warns(StokerWarning, match=r"dataset\.n was 3 and is 2"):
        assert [int(b) for b in loader] == [0, 1, 2]


def test_threads_see_every_change() -> None:
    dataset = Epochs()
    loader = stoker.DataLoader(dataset, num_workers=1, persistent_workers=True, worker_method="thread")
    with warnings.catch_warnings():
        warnings.simplefilter("error", StokerWarning)
        for epoch in range(3):
            dataset.epoch = epoch
            assert [int(b) for b in loader] == [epoch] * 4


def test_what_workers_share_with_the_parent_is_no_change() -> None:
    dataset = Epochs()
    dataset.mask.share_memory_()
    look, whole = Fingerprint(dataset, shared=False), Fingerprint(dataset)
    dataset.mask.fill_(1)
    assert look.changed(dataset) == []
    assert whole.changed(dataset) == ["dataset.mask"]


# ------------------------------------------------------------------------------------------------------------ start-up


class Tally(Dataset):
    """Counts how often it is pickled; holds what needs descriptors."""

    def __init__(self) -> None:
        self.pickled = 0
        self.counter = torch.zeros(4, dtype=torch.int64).share_memory_()
        self.lock = torch.multiprocessing.get_context("spawn").Lock()

    def __getstate__(self) -> dict[str, Any]:
        self.pickled += 1
        return self.__dict__

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> int:
        with self.lock:
            self.counter[0] += 1
        return os.getppid()


@pytest.mark.slow
@pytest.mark.parametrize("context", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_the_dataset_is_pickled_once_for_all_workers(context: str) -> None:
    dataset = Tally()
    batches = list(stoker.DataLoader(dataset, num_workers=4, batch_size=1, multiprocessing_context=context))
    assert dataset.pickled == 1
    assert int(dataset.counter[0]) == 8  # shared tensors stay shared, with every worker
    assert len({int(b) for b in batches}) == 1  # one interpreter started them all
    assert int(batches[0]) != os.getpid()


@pytest.mark.slow
def test_a_worker_under_spawn_has_an_exit_code() -> None:
    it = iter(stoker.DataLoader(Epochs(), num_workers=2, multiprocessing_context="spawn"))
    workers = list(it._workers)
    assert [w.exitcode for w in workers] == [None, None]
    assert len({w.pid for w in workers}) == 2
    list(it)
    assert [w.exitcode for w in workers] == [0, 0]
    assert not any(w.is_alive() for w in workers)


BARE = """
import torch, stoker
for context in ("fork", "spawn"):
    loader = stoker.DataLoader(torch.arange(40), batch_size=4, num_workers=2, multiprocessing_context=context)
    assert torch.cat(list(loader)).tolist() == list(range(40)), context
"""


@pytest.mark.slow
def test_workers_start_where_proc_is_not_mounted(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(f"if __name__ == '__main__':\n{indent(BARE, '    ')}")
    words = [
        "unshare",
        "-rm",
        "sh",
        "-c",
        'mount -t tmpfs none /proc && echo bare && exec "$0" script.py',
        sys.executable,
    ]
    p = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    if "bare" not in p.stdout:
        pytest.skip(f"no namespace of one's own to be had: {p.stderr}")
    assert p.returncode == 0, p.stderr


class Unloadable(Epochs):
    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise ValueError("not here")


@pytest.mark.slow
def test_a_dataset_that_cannot_be_unpickled_ends_the_epoch() -> None:
    it = iter(stoker.DataLoader(Unloadable(), num_workers=2, multiprocessing_context="spawn"))
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        next(it)
