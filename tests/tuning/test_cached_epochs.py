"""Where ``--apply`` has cached epochs made: the order in which both ways are tried, and what decides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from stoker.staging.plan import Plan, WholeNode
from stoker.tuning.cache_pays import why_it_does_not_pay
from stoker.tuning.cached_epochs import MOST_S, CachedEpochs, Maker
from stoker.tuning.kept_epochs import why_not

FILLING = [20.0, 2.0, 0.2, 0.1, 2.2, 640.0]


def row(loop_s: float, wait_s: float) -> list[float]:
    return [20.0, wait_s, loop_s - wait_s, 0.0, loop_s, 640.0]


def run(epochs: CachedEpochs, script: list[float], workers: list[float]) -> list[Maker]:
    """What is chosen, where an epoch by either maker is a row like these."""
    rows: list[list[float]] = []
    made = []
    for k in range(8):
        maker = epochs.choose(rows, filled=k > 0)
        made.append(maker)
        rows.append(FILLING if k == 0 else script if maker is Maker.SCRIPT else workers)
    return made


def test_both_ways_are_timed_and_the_faster_one_stays() -> None:
    w, s = Maker.WORKERS, Maker.SCRIPT
    assert run(CachedEpochs(1e-4, 2, 2), row(0.4, 0.25), row(0.5, 0.3)) == [w, s, w, s, s, s, s, s]
    assert run(CachedEpochs(1e-4, 2, 2), row(0.5, 0.3), row(0.2, 0.1)) == [w, s, w, w, w, w, w, w]


@pytest.mark.parametrize(("loop_s", "wait_s", "cores"), [(2.0, 0.1, 2), (2.0, 1.8, 1), (0.1, 0.08, 2), (0.1, 0.09, 16)])
def test_workers_are_not_timed_where_they_could_save_little(loop_s: float, wait_s: float, cores: int) -> None:
    assert Maker.WORKERS not in run(CachedEpochs(1e-4, 2, cores), row(loop_s, wait_s), row(9.0, 0.1))[1:]


@pytest.mark.parametrize("cores", [2, 4])
def test_workers_are_timed_where_the_loop_waits_for_most_of_an_epoch(cores: int) -> None:
    """As of a collate function that works in Python: with two cores, two workers are twice as fast."""
    assert run(CachedEpochs(1e-4, 2, cores), row(2.0, 1.8), row(1.0, 0.1))[2:] == [Maker.WORKERS] * 6


def test_the_script_s_process_is_not_tried_where_workers_take_much_less() -> None:
    assert Maker.SCRIPT not in run(CachedEpochs(2e-3, 2, 2), row(1.4, 1.2), row(0.7, 0.1))


@pytest.mark.parametrize(("sample_s", "workers", "cores"), [(MOST_S / 100, 2, 2), (2e-3, 8, 16)])
def test_long_epochs_are_left_to_workers(sample_s: float, workers: int, cores: int) -> None:
    assert Maker.SCRIPT not in run(CachedEpochs(sample_s, workers, cores), row(0.1, 0.1), row(0.1, 0.1))


def test_an_epoch_that_nothing_is_known_of_decides_nothing() -> None:
    epochs = CachedEpochs(1e-4, 2, 2)
    assert epochs.choose([], filled=False) is Maker.WORKERS
    assert epochs.choose([], filled=True) is Maker.WORKERS  # the epoch before has no row: nobody watches
    assert epochs.choose([[0.0] * 6], filled=True) is Maker.WORKERS  # or it had no batch


def test_a_cache_is_filled_when_it_is_full_or_grows_no_more() -> None:
    epochs = CachedEpochs(1e-4, 2, 2)
    assert [epochs.is_filled(stored, 1000) for stored in (0, 400, 405, 405, 950)] == [False, False, True, True, True]


def test_an_epoch_that_added_nothing_was_made_of_the_cache() -> None:
    """Calls that are kept fill no room that is known. That the second epoch found all of them shows after it."""
    epochs = CachedEpochs(1e-4, 2, 2)
    rows: list[list[float]] = []
    made = []
    for k, stored in enumerate((0, 600, 600, 600, 600)):
        maker = epochs.choose(rows, epochs.is_filled(stored, 10_000))
        made.append(maker)
        rows.append(FILLING if k == 0 else row(0.1, 0.08) if maker is Maker.SCRIPT else row(0.2, 0.1))
    w, s = Maker.WORKERS, Maker.SCRIPT
    assert made == [w, w, s, s, s], "workers need not be timed again"


class Samples:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> int:
        return i


@pytest.mark.parametrize(
    ("dataset", "settings"),
    [
        (Samples(file=open(__file__)), {}),
        (Samples(state_dict=dict, load_state_dict=id), {}),
        (Samples(), {"persistent_workers": True}),
        (Samples(), {"worker_init_fn": id}),
        (Samples(), {"timeout": 60}),
        (Samples(), {"multiprocessing_context": "spawn"}),
    ],
)
def test_what_needs_processes_of_its_own(dataset: Any, settings: dict[str, Any]) -> None:
    assert why_not(DataLoader(dataset, **{"num_workers": 2, **settings}))


def test_what_does_not() -> None:
    assert why_not(DataLoader(Samples(x=torch.rand(3)), num_workers=2, collate_fn=list)) == ""


def test_a_small_part_of_a_long_sample_does_not_pay() -> None:
    def plan(head_s: float, tail_s: float) -> Plan:
        return Plan(WholeNode(), head_s=head_s, tail_s=tail_s, read_s=20e-6)

    assert why_it_does_not_pay(plan(200e-6, 1e-3)) == ""
    assert "takes 200 us of 20,200 us" in why_it_does_not_pay(plan(200e-6, 20e-3))
    assert why_it_does_not_pay(plan(60e-6, 0.0)) != ""
