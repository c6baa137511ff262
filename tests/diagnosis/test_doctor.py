"""The doctor: what the looking thread sees, what a fetching process says of itself, and each rule at its border."""

from __future__ import annotations

import functools
import io
import math
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset

from stoker.core import monitor, stacks
from stoker.core.histogram import Histogram
from stoker.core.metrics import LoaderMetrics
from stoker.diagnosis.doctor.loader_stats import LoaderStats
from stoker.diagnosis.doctor.verdict import CAUSES, REMEDY, _rank, diagnose
from stoker.diagnosis.doctor.workers import worker_startup
from stoker.diagnosis.report.schema import Finding, LoaderReport
from stoker.diagnosis.watch import stack_sampler as sampler_module
from stoker.diagnosis.watch import worker_record
from stoker.diagnosis.watch.shared_counters import WorkerTimes
from stoker.diagnosis.watch.stack_sampler import SWITCH_S, UNUSED, StackSampler
from tests.diagnosis.helpers import causes, entry, fields
from tests.helpers import Compose


class Flip:
    def __call__(self, x: Any) -> Any:
        return x.flip(0)


class Blur(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return spin(x)


def spin(x: Any) -> Any:
    """Computes in Python for two milliseconds."""
    end = time.thread_time() + 0.002
    while time.thread_time() < end:
        sum(range(100))
    return x


def nap(x: Any) -> Any:
    time.sleep(0.002)
    return x


def many(x: Any) -> Any:
    return torch.stack([spin(v) for v in x])


class Data(Dataset):
    def __init__(self, *transforms: Any, read: Callable[[Any], Any] | None = None) -> None:
        self.transform = Compose(*transforms)
        self.read = read

    def __len__(self) -> int:
        return 100

    def __getitem__(self, i: int) -> Any:
        x = torch.ones(4)
        if self.read is not None:
            x = self.read(x)
        return self.transform(x)


def looked_at(dataset: Any, collate: Any = None, work: Callable[[Any], None] | None = None) -> StackSampler:
    """The looks at this thread while it asks the dataset for samples, until there are thirty of them."""
    work(dataset) if work else dataset[7]  # what takes long the first time is over
    looks = StackSampler()
    looks.transforms, looks.getters = stacks.known_transforms(dataset), stacks.known_getters(dataset)
    looks.collate = worker_record.code_of(collate)
    looks.slow_s = 0.0
    end = time.monotonic() + 60
    while sum(map(sum, looks.counts.values())) < 30:
        assert time.monotonic() < end
        looks.began = time.monotonic()
        work(dataset) if work else dataset[7]
        looks.began = 0.0
    looks.end()
    return looks


@pytest.fixture(autouse=True)
def _switch() -> Iterator[None]:
    """As in a worker: the looking thread gets the interpreter's lock soon."""
    import sys

    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    yield
    sys.setswitchinterval(before)


def parts(looks: StackSampler) -> dict[tuple[str, str], float]:
    out: dict[tuple[str, str], float] = {}
    total = sum(map(sum, looks.counts.values()))
    for (kind, name, _), count in looks.counts.items():
        out[kind, name] = out.get((kind, name), 0.0) + sum(count) / total
    return out


def most(looks: StackSampler) -> tuple[str, str]:
    """What most of the time goes into."""
    found = parts(looks)
    return max(found, key=lambda part: found[part])


@pytest.mark.slow
@pytest.mark.parametrize(
    "dataset",
    [Data(Flip(), Blur()), Subset(Data(Flip(), Blur()), range(50)), Data(Compose(Flip(), Blur()))],
    ids=["listed", "inside another dataset", "inside another Compose"],
)
def test_a_transform_is_called_by_its_name(dataset: Any) -> None:
    assert most(looked_at(dataset)) == ("transform", "Blur")


@pytest.mark.slow
def test_a_transform_that_is_not_known_in_advance() -> None:
    class Hidden(Data):
        def __getitem__(self, i: int) -> Any:
            return Compose(Flip(), Blur())(torch.ones(4))

    # On a busy machine the thread that looks may be late for one whole round.
    assert any(most(looked_at(Hidden())) == ("transform", "Blur") for _ in range(4))


@pytest.mark.slow
@pytest.mark.parametrize(("usual", "own_s"), [(0.005, None), (0.005, 0.001), (0.001001, None)])
def test_looks_rest_and_leave_the_switch_interval_as_it_was(
    usual: float, own_s: float | None, monkeypatch: Any
) -> None:
    """While they rest it is the process' own, and one that somebody sets meanwhile stays. Python hands out 0.001001 as a
    bit less, and cuts that to 0.001 when it gets it back."""
    monkeypatch.setattr(sampler_module, "ENOUGH", 3)
    monkeypatch.setattr(sampler_module, "REST_S", (0.05, 0.05))
    sys.setswitchinterval(usual + 5e-7)
    looks = StackSampler(alone=True)
    looks.began = time.monotonic()
    seen: set[float] = set()
    end = time.monotonic() + 60
    while looks.total < 3 + 3 * sampler_module.BURST or usual not in seen:
        assert time.monotonic() < end
        if looks.total >= 3:
            seen.add(round(sys.getswitchinterval(), 6))
        if own_s is not None and looks.total > 5:
            sys.setswitchinterval(own_s)
            usual = own_s
    looks.end()
    for thread in threading.enumerate():  # its last act is to set the interval, which the next test has chosen by then
        if thread.name == "stoker_sampler":
            thread.join(60)
    assert seen == ({usual, SWITCH_S} if own_s is None else {0.005, SWITCH_S, own_s})
    assert looks.counts


def test_another_thread_is_not_looked_at() -> None:
    found: list[StackSampler] = []

    def run() -> None:
        looks = StackSampler()
        looks.began = time.monotonic()
        spin(1.0)
        found.append(looks)

    t = threading.Thread(target=run)
    t.start()
    t.join(60)
    found[0].end()
    assert found[0].counts == {}


def test_a_call_that_takes_long_is_its_own_line() -> None:
    def nap_and_spin(_: Any) -> None:
        time.sleep(0.1)
        spin(1.0)

    looks = looked_at(Data(), work=nap_and_spin)
    waited = {line: n for (_, _, line), (_, n) in looks.counts.items() if n}
    at = nap_and_spin.__code__.co_firstlineno + 1
    assert max(waited, key=lambda line: waited[line]).endswith(f":{at}")
    assert max(waited.values()) > 0.5 * sum(sum(c) for c in looks.counts.values())


class Rings(Exception):
    pass


def ring(*_: Any) -> None:
    raise Rings


def deep(n: int) -> Iterator[int]:
    """Frames that come and go. None of a destructor: what is raised there is heard by nobody, in Python."""
    yield from (x for x in [n])
    time.sleep(0)
    if n:
        yield from deep(n - 1)


@pytest.mark.slow
def test_looks_take_nothing_from_the_code_they_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another signal's handler raises, again and again, now and then in the middle of a look: it is heard each time."""
    seed = int(time.time())
    print("seed", seed)
    rng = random.Random(seed)
    monkeypatch.setattr("stoker.diagnosis.watch.stack_sampler.INTERVAL_S", 1e-4)
    looks = StackSampler()
    looks.began = time.monotonic()
    looks.slow_s = 0.0
    before = signal.signal(signal.SIGALRM, ring)
    try:
        heard = 0
        limit = time.monotonic() + 60
        for _ in range(2000):
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, 2e-3))
                while time.monotonic() < limit:
                    assert list(deep(5)) == [5, 4, 3, 2, 1, 0]
            except Rings:
                heard += 1
        assert heard == 2000
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        looks.began = 0.0
        looks.end()
    assert sum(map(sum, looks.counts.values())) > 20


@pytest.mark.slow
def test_a_signal_that_somebody_else_takes_is_left_to_them() -> None:
    looks = StackSampler()
    number = next(n for n in UNUSED if signal.getsignal(n) not in (signal.SIG_DFL, signal.SIG_IGN))
    got: list[int] = []
    before = signal.signal(number, lambda n, _: got.append(n))
    try:
        looks.began = time.monotonic()
        end = time.monotonic() + 60
        while looks.total < 10:
            assert time.monotonic() < end
            spin(1.0)
        looks.began = 0.0
        assert got == []
        assert parts(looked_at(Data(spin)))["transform", "spin"] > 0.5  # by another signal
    finally:
        signal.signal(number, before)
        looks.end()


@pytest.mark.slow
def test_a_plain_function_is_a_transform_too() -> None:
    assert parts(looked_at(Data(spin)))["transform", "spin"] > 0.5


@pytest.mark.slow
def test_waiting_is_told_from_computing() -> None:
    waits = looked_at(Data(read=nap))
    computes = looked_at(Data(read=spin))
    assert sum(waited for _, waited in waits.counts.values()) > 0.5 * sum(map(sum, waits.counts.values()))
    assert sum(ran for ran, _ in computes.counts.values()) > 0.5 * sum(map(sum, computes.counts.values()))


@pytest.mark.slow
def test_decoding_is_known_by_its_library() -> None:
    from PIL import Image

    file = io.BytesIO()
    Image.effect_noise((256, 256), 50).convert("RGB").save(file, "JPEG")

    def read(_: Any) -> Any:
        return torch.tensor(Image.open(io.BytesIO(file.getvalue())).convert("RGB").getpixel((1, 1)))

    assert parts(looked_at(Data(read=read)))["decode", "PIL"] > 0.5


class Collates:
    def __call__(self, x: Any) -> Any:
        return many(x)


@pytest.mark.slow
@pytest.mark.parametrize("collate", [many, Collates(), functools.partial(many)])
def test_collating_is_told_from_fetching(collate: Any) -> None:
    kinds = parts(looked_at(Data(), collate, lambda d: collate([torch.ones(2)] * 4)))
    assert sum(v for (kind, _), v in kinds.items() if kind == "collate") > 0.5


@pytest.mark.slow
def test_the_sample_at_work_in_a_slow_task_is_named() -> None:
    assert set(looked_at(Data(spin)).slow) == {"7"}


# ------------------------------------------------------------------------------------------------- a process' account


def test_an_account_is_read_whole_or_not_at_all() -> None:
    row = memoryview(bytearray(worker_record.ROW_BYTES))
    assert worker_record.read(row) is None
    account = worker_record.WorkerRecord(row, Data(), None)
    for _ in range(40):
        account.done(0.01)
    found = worker_record.read(row)
    assert found is not None
    assert sum(found["bins"].values()) >= 32
    length = int.from_bytes(row[:4], "little")
    row[4 + length - 8 : 4 + length] = b"x" * 8
    assert worker_record.read(row) is None
    row[:4] = (1 << 30).to_bytes(4, "little")
    assert worker_record.read(row) is None


def test_accounts_are_read_of_every_worker_that_has_one() -> None:
    """Worker 0 may have died, or be in its first task."""
    metrics = LoaderMetrics()
    times = WorkerTimes(metrics)
    for _ in range(40):
        times.record_of(3, Data(), None).done(0.01)
    times.collect()
    assert metrics.inside is not None
    assert sum(metrics.inside["bins"].values()) >= 32


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=200))
def test_a_histogram_keeps_the_median(seconds: list[float]) -> None:
    times = Histogram()
    times.add(seconds)
    exact = sorted(seconds)[(len(seconds) - 1) // 2]
    assert math.isclose(times.median(), exact, rel_tol=0.1)
    assert times.count == len(seconds)
    assert 0 <= times.slow().share <= 1


def test_accounts_add_up() -> None:
    one = {
        "bins": {"3": 2},
        "stacks": [["fetch", "f", "a.py:1", 1, 0]],
        "slow": {"7": 1},
        "kernel": {"cpu_ns": 5},
        "seconds": 1.0,
        "own": [[0.0, 100], [2.0, 300]],
        "pid": 7,
    }
    both = worker_record.merge([one, one])
    assert worker_record.merge([both]) == both
    assert both == {
        "own": [[[0.0, 100], [2.0, 300]]] * 2,
        "bins": {3: 4},
        "stacks": [["fetch", "f", "a.py:1", 2, 0]],
        "slow": {"7": 2},
        "kernel": {"cpu_ns": 10},
        "seconds": 2.0,
    }


def test_the_machine_is_looked_at() -> None:
    a = monitor.SystemMonitor()
    a._sample()
    seen = a.stop()
    assert seen["memory_available_min"] > 0
    assert seen["gpu_busy"] == [] or all(0 <= b <= 1 for b in seen["gpu_busy"])


def test_stalls_for_memory_from_before_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    total = 5_000_000
    monkeypatch.setattr(monitor.resources, "memory_stalled", lambda: total)
    a = monitor.SystemMonitor()
    total += 2_000_000
    a._sample_stalls()
    assert a.stop()["memory_stalled_max"] == pytest.approx(0.2, abs=0.01)  # two of ten seconds


# --------------------------------------------------------------------------------------------------------------- rules


def test_a_loader_that_is_fine() -> None:
    assert diagnose([entry()], 2, False) == ("healthy", [])


@pytest.mark.parametrize("around", [{"memory_stalled_max": 0.4}, {"swapped": 1 << 30}], ids=["psi", "swap"])
def test_memory_pressure(around: dict[str, Any]) -> None:
    assert causes(around=around) == ["memory_pressure"]
    assert causes(around={"memory_stalled_max": 0.01, "swapped": 4096}) == []


def test_shm_too_small() -> None:
    assert causes(around={"shm_free_min": 8 << 20}) == ["shm_too_small"]
    assert causes(around={"shm_free_min": 1 << 30}) == []
    assert causes(around={"shm_free_min": 8 << 20}, settings={"engine": "stoker"}) == []


def test_pin_memory_wasted() -> None:
    assert causes(settings={"pin_memory": True}) == ["pin_memory_wasted"]
    assert causes(settings={"pin_memory": True}, gpus=1) == []


def test_gil_bound() -> None:
    threads = {"worker_method": "thread", "engine": "stoker", "num_workers": 4}
    busy = {
        "fetch": {"self_s": 8.0},
        "collate": {"self_s": 0.1},
        "transport": {"self_s": 0.0},
        "worker": {"cpu_s": 2.1, "tasks": 100},
    }
    stages = {**fields()["stages"], **busy}
    assert causes(settings=threads, stages=stages, wait_s=2.0, step_s=0.2, cores=4) == ["gil_bound"]
    at_once = {**stages, "worker": {"cpu_s": 7.9, "tasks": 100}}
    assert "gil_bound" not in causes(settings=threads, stages=at_once, wait_s=2.0, step_s=0.2, cores=4)


def test_stokers_own_engine_is_not_told_to_copy_less() -> None:
    late: dict[str, Any] = {"wait_s": 2.0, "waits": {"median_s": 0.02}}
    assert "slow_transport" in causes(**late)
    assert "slow_transport" not in causes(**late, settings={"engine": "stoker"})


def test_a_datasets_own_threads() -> None:
    """The fetching thread waits for a pool of threads, which together use one core, or more."""
    waits = [{"kind": "fetch", "name": "__getitems__", "line": "train.py:9", "ran": 0.1, "waited": 0.9}]
    changes: dict[str, Any] = {"wait_s": 2.0, "step_s": 0.1, "looks": 100, "where": waits}
    changes["stages"] = {**fields()["stages"], "fetch": {"self_s": 2.0}, "worker": {"cpu_s": 0.1, "tasks": 100}}
    changes["settings"] = {"num_workers": 1}
    turns, together, sleep = ({"cpu_ns": ns} for ns in (2_000_000_000, 6_000_000_000, 300_000_000))
    assert causes(**changes, kernel=turns) == ["gil_bound"]
    assert causes(**changes, kernel=turns, cores=1) == ["too_few_cores"]
    assert causes(**changes, kernel=together) == ["too_few_workers"]  # they use three cores
    assert "gil_bound" not in causes(**changes, kernel=sleep)
    assert "slow_storage" in causes(**changes, kernel=sleep)
    busy = {**changes, "where": [{**waits[0], "ran": 0.9, "waited": 0.1}]}
    assert "gil_bound" not in causes(**busy, kernel=turns)  # it computes itself
    changes["settings"] = {"num_workers": 0}
    assert causes(**changes, kernel=turns, cores=4) == ["gil_bound"]


@pytest.mark.parametrize("workers", [0, 1, 8])
def test_no_diff_gives_other_workers_to_a_stream_that_would_repeat_its_samples(workers: int) -> None:
    """Of one that asks which worker it is in, it does."""
    changes: dict[str, Any] = {"wait_s": 4.0, "step_s": 0.1, "stages": {**fields()["stages"], "fetch": {"self_s": 4.0}}}
    if workers == 8:  # too many for two cores
        changes["kernel"] = {"delay_ns": 8_000_000_000, "seconds": 10.0}
    for divides in (True, False):
        stream = {**fields()["settings"], "num_workers": workers, "iterable": True, "divides": divides}
        found = diagnose([entry(**changes, settings=stream)], 2, False)[1]
        about = [f for f in found if f.cause.endswith(("_workers", "_loading"))]
        assert len(about) == 1
        assert about[0].change == ({"num_workers": 2} if divides else {})
        assert ("get_worker_info" in about[0].fix) != divides


@pytest.mark.parametrize("workers", [0, 1])
def test_no_diff_changes_what_a_script_draws(workers: int) -> None:
    """Where its own process makes batches. Those of a worker are drawn in the worker already."""
    changes: dict[str, Any] = {"wait_s": 4.0, "step_s": 0.1, "stages": {**fields()["stages"], "fetch": {"self_s": 4.0}}}
    for draws in (True, False):
        settings = {**fields()["settings"], "num_workers": workers, "draws": draws}
        found = diagnose([entry(**changes, settings=settings)], 2, False)[1]
        (about,) = [f for f in found if f.cause.endswith(("_workers", "_loading"))]
        by_hand = draws and not workers
        assert about.change == ({} if by_hand else {"num_workers": 2})
        assert ("random numbers" in about.fix) == by_hand


def test_a_slow_collate_function_is_named_by_its_line() -> None:
    where = [{"kind": "collate", "name": "collate", "line": "train.py:9", "ran": 0.7, "waited": 0.0}]
    stages = {"fetch": {"self_s": 0.1}, "collate": {"self_s": 6.0}}
    (found,) = [
        f
        for f in diagnose([entry(wait_s=3.0, step_s=0.5, looks=100, where=where, stages=stages)], 2, False)[1]
        if f.cause == "slow_collate"
    ]
    assert "70% in collate (train.py:9)" in found.fix


@pytest.mark.parametrize(("fetch_s", "collate_s"), [(0.06, 5.94), (4.0, 2.0)])
def test_samples_that_are_a_small_part_of_a_task_are_not_worth_a_cache(fetch_s: float, collate_s: float) -> None:
    """The loop takes longer than its parts explain, and would so with a cache."""
    stages = {"fetch": {"self_s": fetch_s}, "collate": {"self_s": collate_s}, "worker": {"cpu_s": 4.0, "tasks": 100}}
    found = causes(wait_s=4.0, step_s=0.5, loop_s=4.5, epochs=2, stages=stages)
    assert ("cacheable_prefix" in found) == (fetch_s > 1)


def test_what_was_dropped_for_want_of_memory_is_not_the_storages() -> None:
    where = [{"kind": "fetch", "name": "__getitem__", "line": "train.py:9", "ran": 0.1, "waited": 0.7}]
    waits = {"wait_s": 3.0, "step_s": 0.5, "looks": 100, "where": where, "stages": {"fetch": {"self_s": 6.0}}}
    assert causes(cores=2, **waits)[0] == "slow_storage"
    assert causes(cores=2, around={"memory_stalled_max": 0.2}, **waits)[0] == "slow_storage"  # most waits are others
    found = causes(cores=2, around={"memory_stalled_max": 0.6}, **waits)
    assert found[0] == "memory_pressure"
    assert "slow_storage" not in found


def test_a_line_that_reads_dropped_pages_again_is_not_a_slow_transform() -> None:
    where = [{"kind": "fetch", "name": "__getitem__", "line": "train.py:9", "ran": 0.4, "waited": 0.3}]
    reads = {"wait_s": 3.0, "step_s": 0.5, "looks": 100, "where": where, "stages": {"fetch": {"self_s": 6.0}}}
    assert causes(cores=2, **reads)[0] == "slow_transform"
    found = causes(cores=2, around={"memory_stalled_max": 0.3}, **reads)
    assert found.index("memory_pressure") < found.index("slow_transform")


@pytest.mark.parametrize(
    ("made", "at_once", "persistent", "change"),
    [
        (1, 1, False, {"persistent_workers": True}),  # one loader, ten epochs
        (1, 1, True, None),
        (2, 2, False, {"persistent_workers": True}),  # for training and for validation, five each
        (2, 2, True, None),
        (2, 1, False, {"persistent_workers": True}),  # two folds
        (10, 1, False, {}),  # one for each epoch: no setting helps
        (10, 1, True, {}),
        (10, 2, True, {}),
        (10, 10, False, None),  # ten that are used once each
    ],
)
def test_workers_stay_as_long_as_their_loader(made: int, at_once: int, persistent: bool, change: Any) -> None:
    starts = {
        "epochs": 10,
        "ended": 10,
        "made": made,
        "at_once": at_once,
        "wait_s": 2.0,
        "stages": {"startup": {"wait_s": 1.9}},
    }
    settings = {**fields()["settings"], "persistent_workers": persistent}
    found = worker_startup(LoaderStats(entry(**starts, settings=settings), 2))
    assert (found and found.change) == change
    if found is not None:
        assert ("create the loader once, not 10 times" in found.fix) == (change == {})


@pytest.mark.parametrize("persistent", [False, True])
def test_an_iterator_for_each_step(persistent: bool) -> None:
    asked = {"epochs": 50, "ended": 1, "batches": 60, "between_s": 1.0, "step_s": 0.0, "wait_s": 2.0}
    seen = entry(
        **asked,
        stages={"startup": {"wait_s": 1.9}},
        settings={**fields()["settings"], "persistent_workers": persistent},
    )
    found = worker_startup(LoaderStats(seen, 2))
    assert found is not None
    assert (found.change, "49 epochs are left after one batch; keep one iterator" in found.fix) == ({}, True)
    assert 1.5 < (found.predicted_speedup or 0) < 3.0  # the steps in between stay
    assert "keep one" not in str(
        worker_startup(LoaderStats(msgspec.structs.replace(seen, batches=2500), 2))
    )  # epochs of fifty steps


def test_a_wait_counts_against_the_time_that_the_worker_had_a_core() -> None:
    where = [{"kind": "fetch", "name": "__getitem__", "line": "train.py:9", "ran": 0.7, "waited": 0.25}]
    stages = {"fetch": {"self_s": 6.0}, "worker": {"cpu_s": 3.0, "tasks": 100}}
    waits = {"wait_s": 3.0, "step_s": 0.5, "looks": 100, "where": where, "stages": stages}
    assert "slow_storage" not in causes(cores=2, **waits)
    assert "slow_storage" in causes(cores=2, kernel={"delay_ns": 2_000_000_000, "seconds": 7.0}, **waits)
    waits["where"] = []  # of a worker that never had one, nothing is said
    assert "slow_storage" not in causes(cores=2, kernel={"delay_ns": 9_000_000_000, "seconds": 9.0}, **waits)


def test_cold_cache() -> None:
    by_epoch = [[50, 1.0, 0.5, 0.1], [50, 0.06, 0.5, 0.05], [50, 0.06, 0.5, 0.05]]
    changes = {"by_epoch": by_epoch, "epochs": 3, "batches": 150, "wait_s": 1.12, "step_s": 1.5}
    stages = {**fields()["stages"], "worker": {"cpu_s": 2.0, "tasks": 150}, "fetch": {"self_s": 2.0}}
    slept = [{"kind": "fetch", "name": "__getitem__", "line": "train.py:9", "ran": 0.2, "waited": 0.8}]
    changes |= {"looks": 100, "where": slept, "stages": stages}
    assert causes(**changes, kernel={"stored": 1 << 30})[0] == "cold_cache"
    assert "cold_cache" not in causes(**changes, kernel={"stored": 1 << 30}, cache={"filled": 400})
    computes = [{**slept[0], "ran": 1.0, "waited": 0.0}]  # who loses time to something else reads from a disk as well
    assert "cold_cache" not in causes(**{**changes, "where": computes}, kernel={"stored": 1 << 30})
    assert "cold_cache" not in causes(**changes, kernel={"stored": 4096})


def test_causes_stand_in_the_order_of_what_they_cost() -> None:
    """A prediction takes it that nothing of a cause remains: a transform that cannot be kept would come first."""
    transform = Finding("slow_transform", 0.59, predicted_speedup=3.3)
    workers = Finding("too_few_workers", 0.7, predicted_speedup=2.0)
    cache = Finding(REMEDY.__name__, 0.6, predicted_speedup=3.1)
    found = sorted([transform, workers, cache], key=lambda f: _rank(f, 1.0), reverse=True)
    assert [f.cause for f in found] == [REMEDY.__name__, "too_few_workers", "slow_transform"]


def test_growth_is_not_a_start() -> None:
    grows = [[t, (100 + 60 * t) * 1e6] for t in range(8)]
    settles = [[0, 6e7], *([t, 2e8 + t % 2 * 1e6] for t in range(1, 8))]
    assert causes(memory={"own": [grows, settles]}) == ["worker_memory_growth"]
    assert causes(memory={"own": [settles]}) == []
    assert causes(memory={"own": [grows[:4], grows[:4]]}) == []  # lives of an epoch each, that start anew


def test_few_batches_decide_nothing() -> None:
    assert diagnose([entry(batches=3, wait_s=9.0)], 2, False) == ("unknown", [])


def test_the_docs_list_every_cause_and_nothing_else() -> None:
    text = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert sorted(listed) == sorted((*CAUSES, REMEDY.__name__))


def test_a_report_of_an_earlier_version_is_no_error() -> None:
    gone = ("steps", "waits", "tasks", "by_epoch", "where", "looks", "kernel")
    old = {key: value for key, value in fields().items() if key not in gone}
    old |= {"memory": {"worker_pss": [], "batch_bytes": 0}, "helpers": {"looks": 1}, "kernel": {}, "device": {}}
    loader = msgspec.convert(old, LoaderReport)
    assert LoaderStats(loader, 2).share < 0.1
    assert diagnose([loader], 2, False)[0] == "healthy"
