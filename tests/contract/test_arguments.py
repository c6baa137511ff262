"""Wrong arguments get torch's error, attributes are torch's, and the iterator has torch's names."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

import stoker
import stoker.core.errors
from stoker.core.errors import StokerWarning
from stoker.core.options import AutoWorkers
from stoker.loader import engine, loader_state
from stoker.loader.loader_state import state_of

from . import datasets as d
from .trace import canon

MAP, STREAM = d.Map(10, "tensor"), d.Stream(10, "tensor")
WRONG: list[tuple[Any, dict[str, Any]]] = [
    (MAP, {"num_workers": -1}),
    (MAP, {"timeout": -1}),
    (MAP, {"prefetch_factor": 2}),
    (MAP, {"num_workers": 1, "prefetch_factor": -2}),
    (MAP, {"persistent_workers": True}),
    (MAP, {"multiprocessing_context": "fork"}),
    (MAP, {"num_workers": 1, "multiprocessing_context": "no such"}),
    (MAP, {"num_workers": 1, "multiprocessing_context": object}),
    (MAP, {"sampler": RandomSampler(MAP), "shuffle": True}),
    (MAP, {"batch_sampler": [[1]], "batch_size": 3}),
    (MAP, {"batch_sampler": [[1]], "shuffle": True}),
    (MAP, {"batch_sampler": [[1]], "sampler": [1]}),
    (MAP, {"batch_sampler": [[1]], "drop_last": True}),
    (MAP, {"batch_size": None, "drop_last": True}),
    (MAP, {"batch_size": 0}),
    (MAP, {"batch_size": "three"}),
    (MAP, {"num_workers": "many"}),
    (MAP, {"num_workers": None}),
    (STREAM, {"shuffle": True}),
    (STREAM, {"shuffle": 3}),
    (STREAM, {"sampler": [1]}),
    (STREAM, {"batch_sampler": [[1]]}),
    (d.Map(0, "tensor"), {"shuffle": True}),
    (MAP, {"no_such_argument": 1}),
]
LATE: list[tuple[Any, dict[str, Any]]] = [
    (MAP, {"timeout": 1}),
    (MAP, {"num_workers": 1, "prefetch_factor": 0}),
]
FROZEN = ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"]


def outcome(act: Any) -> tuple[str, str]:
    try:
        act()
    except Exception as e:
        return type(e).__name__, str(e).replace("stoker.loader.dataloader.", "").replace(
            "_MultiProcessingDataLoaderIter", ""
        )
    return "nothing", ""


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_wrong_arguments_get_torchs_error(case: int) -> None:
    dataset, kwargs = WRONG[case]
    theirs = outcome(lambda: torch.utils.data.DataLoader(dataset, **kwargs))
    assert theirs[0] != "nothing"
    assert outcome(lambda: stoker.DataLoader(dataset, **kwargs)) == theirs


@pytest.mark.parametrize("case", range(len(LATE)))
def test_what_torch_finds_only_when_iterated(case: int) -> None:
    dataset, kwargs = LATE[case]
    assert outcome(lambda: iter(torch.utils.data.DataLoader(dataset, **kwargs)))[0] == "AssertionError"
    assert outcome(lambda: iter(stoker.DataLoader(dataset, **kwargs)))[0] == "AssertionError"


@pytest.mark.parametrize("name", FROZEN)
def test_frozen_attributes(name: str) -> None:
    theirs, ours = torch.utils.data.DataLoader(MAP), stoker.DataLoader(MAP)
    assert outcome(lambda: setattr(ours, name, 1)) == outcome(lambda: setattr(theirs, name, 1))
    ours.num_workers = 2
    assert ours.num_workers == 2


def test_the_signature_is_torchs() -> None:
    theirs = inspect.signature(torch.utils.data.DataLoader.__init__).parameters
    ours = inspect.signature(stoker.DataLoader.__init__).parameters
    look = [(p.name, p.kind, p.default) for p in ours.values()]
    assert look[: len(theirs)] == [(p.name, p.kind, p.default) for p in theirs.values()]
    newer = [] if "in_order" in theirs else [("in_order", inspect.Parameter.KEYWORD_ONLY)]  # torch < 2.6
    assert [(name, kind) for name, kind, _ in look[len(theirs) :]] == [
        *newer,
        ("worker_method", inspect.Parameter.KEYWORD_ONLY),
        ("budget", inspect.Parameter.KEYWORD_ONLY),
        ("debug", inspect.Parameter.KEYWORD_ONLY),
        ("device", inspect.Parameter.KEYWORD_ONLY),
        ("transform_on_device", inspect.Parameter.KEYWORD_ONLY),
        ("on_error", inspect.Parameter.KEYWORD_ONLY),
        ("refill", inspect.Parameter.KEYWORD_ONLY),
        ("max_errors", inspect.Parameter.KEYWORD_ONLY),
        ("quarantine", inspect.Parameter.KEYWORD_ONLY),
        ("on_worker_death", inspect.Parameter.KEYWORD_ONLY),
        ("sample_timeout", inspect.Parameter.KEYWORD_ONLY),
        ("read_threads", inspect.Parameter.KEYWORD_ONLY),
        ("task_seeds", inspect.Parameter.KEYWORD_ONLY),
        ("snapshot_every_n_steps", inspect.Parameter.KEYWORD_ONLY),
    ]


def loaders() -> Iterator[tuple[str, Any]]:
    numbers = list(range(10))
    yield "plain", stoker.DataLoader(MAP, batch_size=3, num_workers=1)
    yield "inline", stoker.DataLoader(MAP, 4)
    yield "auto", stoker.DataLoader(MAP, batch_size=3, shuffle=True, num_workers="auto", drop_last=True)
    yield "shuffled", stoker.DataLoader(MAP, batch_size=3, shuffle=True, num_workers=2, prefetch_factor=3)
    yield (
        "context",
        stoker.DataLoader(MAP, num_workers=1, multiprocessing_context="fork", timeout=9, persistent_workers=True),
    )
    yield "sampler", stoker.DataLoader(MAP, batch_size=2, sampler=numbers)
    yield (
        "faults",
        stoker.DataLoader(MAP, 4, num_workers=1, on_error="skip", refill=True, max_errors=3, sample_timeout=9),
    )
    yield "batch sampler", stoker.DataLoader(MAP, batch_sampler=[[1, 2], [3]])
    yield "no batches", stoker.DataLoader(MAP, batch_size=None)
    yield "stream", stoker.DataLoader(STREAM, batch_size=3, num_workers=1)
    yield "auto stream", stoker.DataLoader(STREAM, batch_size=3, num_workers="auto")


def test_processes_have_two_names() -> None:
    """ "multiprocessing" is the word of torch's proposal of this argument."""
    loader = stoker.DataLoader(MAP, batch_size=3, num_workers=1, worker_method="multiprocessing")
    assert loader.worker_method == "process"
    assert len(list(loader)) == len(loader)
    theirs = torch.utils.data.DataLoader(MAP, batch_size=3, num_workers=1)
    with stoker.installed(worker_method="multiprocessing"):
        assert len(list(theirs)) == len(theirs)
    assert theirs.worker_method == "process"  # type: ignore[attr-defined]
    with pytest.raises(stoker.core.errors.UsageError, match="one of 'process', 'thread'"):
        stoker.DataLoader(MAP, worker_method="multiprocess")


@pytest.mark.few(4)
@pytest.mark.parametrize("name", [name for name, _ in loaders()])
def test_a_loader_can_be_built_again_from_its_attributes(name: str) -> None:
    """Every argument is a public attribute of the same name, and all of them together make the same loader again."""
    loader = dict(loaders())[name]
    names = list(inspect.signature(type(loader).__init__).parameters)[1:]
    again = type(loader)(**{n: getattr(loader, n) for n in names})
    for n in names:
        if n not in ("sampler", "batch_sampler"):
            assert getattr(again, n) == getattr(loader, n), n
    assert isinstance(again.num_workers, AutoWorkers) == name.startswith("auto")
    assert isinstance(loader.num_workers, int)
    torch.manual_seed(0)
    first = [canon(b) for b in loader]
    torch.manual_seed(0)
    assert [canon(b) for b in again] == first


@pytest.mark.few(3)
@pytest.mark.parametrize("name", [name for name, _ in loaders() if name not in ("batch sampler", "no batches")])
def test_lightning_builds_it_again(name: str) -> None:
    """The steps of Lightning's ``_get_dataloader_init_args_and_kwargs``, with another sampler put in."""
    loader = dict(loaders())[name]
    attrs = {k: v for k, v in vars(loader).items() if not k.startswith("_")}
    attrs["multiprocessing_context"] = loader.multiprocessing_context
    params = dict(inspect.signature(type(loader).__init__).parameters)
    wanted = {n for n, p in params.items() if n in attrs and p.default is not attrs[n]} | {"dataset"}
    kwargs = {k: v for k, v in attrs.items() if k in wanted}
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        kwargs.update(sampler=None, batch_sampler=None)
    else:
        sampler = DistributedSampler(loader.dataset, num_replicas=2, rank=0, shuffle=False)
        kwargs.update(sampler=sampler, shuffle=False, batch_sampler=None)
    again = type(loader)(**kwargs)
    assert again.batch_size == loader.batch_size
    assert isinstance(again.num_workers, AutoWorkers) == name.startswith("auto")
    assert list(again)


def test_the_iterator_has_torchs_names() -> None:
    loader = stoker.DataLoader(MAP, batch_size=3, num_workers=2, persistent_workers=True)
    assert isinstance(loader, torch.utils.data.DataLoader)
    assert loader._iterator is None
    assert loader._auto_collation
    assert loader._index_sampler is loader.batch_sampler
    it = iter(loader)
    assert isinstance(it, _BaseDataLoaderIter)
    assert loader._iterator is it
    assert len(it) == 4
    next(it)
    assert it._num_yielded == 1
    assert [w.is_alive() for w in it._workers] == [True, True]
    assert len({w.pid for w in it._workers}) == 2
    with pytest.raises(NotImplementedError):
        pickle.dumps(it)
    assert iter(loader) is it
    assert it._num_yielded == 0
    assert len(list(it)) == 4
    workers = it._workers
    it._shutdown_workers()
    assert [w.exitcode for w in workers] == [0, 0]


def test_it_takes_one_type_parameter_and_two_as_later_torch() -> None:
    class Mine(stoker.DataLoader[int, list[int]]):  # type: ignore[type-arg]
        pass

    assert str(stoker.DataLoader[int]) == str(stoker.DataLoader[int, str])  # type: ignore[type-arg]
    assert isinstance(Mine([1, 2]), torch.utils.data.DataLoader)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name",
    [name for name, loader in loaders() if not loader.persistent_workers],
)
def test_a_loader_can_be_copied_and_pickled(name: str) -> None:
    loader = dict(loaders())[name]
    next(iter(loader))
    for again in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert again.num_workers == loader.num_workers
        assert isinstance(again.num_workers, AutoWorkers) == isinstance(loader.num_workers, AutoWorkers)
        assert len([canon(b) for b in again]) > 0


def test_too_many_workers_are_warned_of_as_torch_does() -> None:
    def words(cls: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            cls(MAP, num_workers=1000)
        return [str(w.message) for w in caught]

    assert words(stoker.DataLoader) == words(torch.utils.data.DataLoader) != []


def test_the_samplers_are_torchs() -> None:
    assert isinstance(stoker.DataLoader(MAP).sampler, SequentialSampler)
    assert isinstance(stoker.DataLoader(MAP, shuffle=True).sampler, RandomSampler)
    assert type(stoker.DataLoader(MAP).batch_sampler) is BatchSampler
    assert stoker.DataLoader(MAP, shuffle=True).shuffle is True


@pytest.mark.parametrize("kw", [{"max_errors": 3}, {"quarantine": "broken.jsonl"}], ids=str)
def test_settings_for_samples_that_fail_want_a_policy(kw: dict[str, Any]) -> None:
    with pytest.raises(stoker.core.errors.UsageError, match=f'{next(iter(kw))}= .* no effect with on_error="raise"'):
        stoker.DataLoader(MAP, **kw)
    stoker.DataLoader(MAP, quarantine=None)


@pytest.mark.parametrize(
    ("kw", "named"),
    [
        ({"budget": "1GB"}, "budget. Reason: without workers"),
        (
            {"debug": True, "on_error": "skip", "sample_timeout": 9},
            "on_error, sample_timeout. Reason: debug=True raises",
        ),
    ],
    ids=["no workers", "debug"],
)
def test_a_setting_without_an_effect_is_named_once(kw: dict[str, Any], named: str) -> None:
    loader = stoker.DataLoader(MAP, **kw)
    with pytest.warns(StokerWarning, match=named) as found:
        list(loader)
    assert [w.filename for w in found] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(loader)
        list(stoker.DataLoader(MAP))


class ByValue(torch.utils.data.DataLoader):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByValue)

    def __hash__(self) -> int:
        return 1


def test_loaders_that_are_equal_have_states_of_their_own() -> None:
    """Their workers' memory, their place in the epoch, their numbers."""
    one, two = ByValue(range(4), num_workers=1), ByValue(range(4), num_workers=1)  # type: ignore[arg-type]
    with stoker.installed():
        first, second = iter(one), iter(two)
        assert [int(next(first)), int(next(first)), int(next(second))] == [0, 1, 0]
    assert state_of(one) is not state_of(two)
    assert engine.state_dict(one)["next"] == 2
    assert engine.state_dict(two)["next"] == 1


def test_the_state_of_a_loader_goes_with_it() -> None:
    loader = ByValue(MAP)
    state_of(loader)
    known = len(loader_state._states)
    del loader
    gc.collect()
    assert len(loader_state._states) < known
