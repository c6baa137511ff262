"""The watch on the device, with a stand-in: a device that does one thing after the other, and tells the time."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields as fields_of

from stoker.core.metrics import LoaderMetrics
from stoker.diagnosis.doctor.loader_stats import Around, LoaderStats
from stoker.diagnosis.doctor.verdict import diagnose
from stoker.diagnosis.report import merge
from stoker.diagnosis.report.schema import Crossing, LoaderReport
from stoker.diagnosis.watch import device as watch_device
from stoker.diagnosis.watch.clock import MOST_TIMES
from stoker.diagnosis.watch.device import PAIRS, PERIOD_S, Crossings, Gaps
from stoker.diagnosis.watch.watch import ProcessWatch
from tests.diagnosis.helpers import causes, entry, fields


class Device:
    """A queue of work and a clock that both it and the host go by."""

    def __init__(self) -> None:
        self.now = 100.0  # of the host
        self.free_at = 100.0  # when all that was asked for is done

    def launch(self, seconds: float) -> None:
        self.free_at = max(self.free_at, self.now) + seconds

    def event(self) -> Event:
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self._device, self._reached = device, 0.0

    def record(self) -> None:
        self._reached = max(self._device.now, self._device.free_at)

    def query(self) -> bool:
        return self._device.now >= self._reached

    def elapsed_time(self, other: Event) -> float:
        return (other._reached - self._reached) * 1e3


def run(steps: list[tuple[float, float, float]]) -> tuple[LoaderMetrics, float]:
    """A loop of (wait, work for the device, host's own time) in seconds; and how long the device idled in the waits."""
    device, metrics = Device(), LoaderMetrics()
    gaps = Gaps(metrics, device.event)
    idle = 0.0
    for wait, work, own in steps:
        device.launch(work)
        device.now += own
        gaps.enter(device.now)
        idle += max(0.0, device.now + wait - max(device.now, device.free_at))
        device.now += wait
        gaps.leave(wait)
    device.now = max(device.now, device.free_at) + 1
    gaps.enter(device.now)
    return metrics, idle


_SECONDS = st.floats(0.002, 0.1)


@given(st.lists(st.tuples(_SECONDS, _SECONDS, _SECONDS), min_size=1, max_size=40))
def test_the_gap_is_the_devices_own_idle_time(steps: list[tuple[float, float, float]]) -> None:
    metrics, idle = run(steps)
    assert metrics.gaps == len(steps)
    assert metrics.gap_s == pytest.approx(idle)
    assert metrics.gap_wait_s == pytest.approx(sum(wait for wait, _, _ in steps))


def test_a_wait_under_a_full_queue_starves_nobody() -> None:
    metrics, _ = run([(0.01, 0.1, 0.001)] * 20)
    assert metrics.gap_wait_s == pytest.approx(0.2)
    assert metrics.gap_s < 1e-9


def test_a_device_that_never_gets_there_is_not_waited_for() -> None:
    device, metrics = Device(), LoaderMetrics()
    made = []

    def make() -> Event:
        made.append(device.event())
        return made[-1]

    gaps = Gaps(metrics, make)
    device.launch(1e9)
    for _ in range(10 * PAIRS):
        gaps.enter(device.now)
        device.now += 0.01
        gaps.leave(0.01)
    assert metrics.gaps == 0
    assert len(made) <= 2 * PAIRS


def test_a_forked_child_destroys_no_event_and_asks_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The destructor of a CUDA event ends a forked child by SIGABRT: workers of a second epoch died of it."""
    here = os.getpid()

    class OfCuda(Event):
        def __init__(self, **_: bool) -> None:
            super().__init__(Device())

        def query(self) -> bool:
            return here == os.getpid() or os.abort()

        def __del__(self) -> None:
            if here != os.getpid():
                os.abort()

    monkeypatch.setattr(torch.cuda, "Event", OfCuda)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: os.getpid() == here)
    watch, metrics = ProcessWatch(), LoaderMetrics("train.py:1", settings={"batch_size": 4})
    watch.loaders[metrics.name] = metrics
    clock = watch.clock(metrics, 0.0, time.perf_counter())
    now = time.perf_counter()
    for _ in range(4 * MOST_TIMES):
        clock.before(now)
        clock.after(now, now + PERIOD_S, 4)
        now += 2 * PERIOD_S
    assert watch._devices[metrics.name]._gaps._flying
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            watch.forked()
            clock.before(now)
            clock.after(now, now + PERIOD_S, 4)
            del clock, watch
            gc.collect()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.fixture
def crossings() -> Any:
    before = dict(vars(torch.Tensor))
    c = Crossings(LoaderMetrics(), device="meta")
    c.begin()
    yield c
    c.end()
    assert dict(vars(torch.Tensor)) == before


def kinds(c: Crossings) -> dict[str, int]:
    out: dict[str, int] = {}
    for key, (n, _, _) in c._metrics.crossings.items():
        kind = key.partition(" ")[0]
        out[kind] = out.get(kind, 0) + int(n)
    return out


def test_copies_to_the_device_are_told_by_their_memory(crossings: Crossings, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = torch.ones(4, 4)
    assert batch.to("meta").device.type == "meta"
    assert kinds(crossings) == {"pageable": 1}
    (line,) = crossings._metrics.crossings
    assert "test_watch_device.py" in line
    assert crossings._metrics.crossings[line][2] == batch.nbytes
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    batch.to("meta")
    batch.to("meta", non_blocking=True)
    batch.to("meta", torch.float64, True)
    assert kinds(crossings) == {"pageable": 1, "blocking": 1, "free": 2}
    batch.to(torch.float64)
    batch.tolist()
    torch.zeros(1, device="meta").to("meta")
    assert kinds(crossings) == {"pageable": 1, "blocking": 1, "free": 2}


def test_what_is_wrapped_does_what_it_did(crossings: Crossings) -> None:
    class Mine(torch.Tensor):
        pass

    assert type(torch.ones(2).as_subclass(Mine).to(torch.float64)) is Mine
    assert torch.nn.Parameter(torch.ones(1)).item() == 1
    with pytest.raises(RuntimeError):
        torch.zeros(2).item()
    with pytest.raises(TypeError):
        torch.zeros(2).to(nonsense=True)
    assert torch.zeros(2).copy_(torch.ones(2)).tolist() == [1, 1]
    assert torch.compiler.is_compiling() is False
    assert kinds(crossings) == {}


def test_only_a_few_steps_are_timed() -> None:
    metrics = LoaderMetrics()
    c = Crossings(metrics, device="meta")
    original = torch.Tensor.to
    wrapped = 0
    for _ in range(watch_device.FIRST + watch_device.EVERY + watch_device.TIMED_STEPS + 5):
        wrapped += torch.Tensor.to is not original
        c.step(0.001)
    assert torch.Tensor.to is original or torch.Tensor.to == original
    assert wrapped == metrics.crossing_steps == 2 * watch_device.TIMED_STEPS


def test_loaders_in_step_leave_torchs_methods_as_they_were() -> None:
    before, synchronize = dict(vars(torch.Tensor)), torch.cuda.synchronize
    first, second = (Crossings(LoaderMetrics(), device="meta") for _ in range(2))
    first.begin()
    second.begin()
    torch.ones(2).to("meta")
    first.end()
    torch.ones(2).to("meta")
    second.end()
    torch.ones(2).to("meta")
    assert dict(vars(torch.Tensor)) == before
    assert torch.cuda.synchronize is synchronize
    assert [sum(n for n, _, _ in c._metrics.crossings.values()) for c in (first, second)] == [1, 2]


# --------------------------------------------------------------------------------------------------------------- rules


def device(gaps: int = 0, starved: float = 1.0, pinned: int = 0, **calls: tuple[int, float, int]) -> dict[str, Any]:
    """What was seen of a device in 8 steps of 10 ms."""
    found = [
        {"kind": kind, "line": "train.py:9", "calls": n, "seconds": s, "bytes": b} for kind, (n, s, b) in calls.items()
    ]
    seen = {"gaps": gaps, "starved_share_of_wait": starved, "steps": 8, "seconds": 0.08, "crossings": found}
    return {**seen, "pinned_bytes": pinned}


def found(gpu: float, memory: int = 0, around: dict[str, Any] | None = None, **changes: Any) -> list[str]:
    return causes(around={"gpu_busy": [gpu], **(around or {})}, cuda=True, gpus=1, memory_granted=memory, **changes)


def test_a_pageable_copy() -> None:
    assert found(0.95, device=device(pageable=(8, 0.02, 8 << 20))) == ["pageable_transfer"]
    assert found(0.95, device=device(pageable=(8, 0.001, 1 << 20))) == []
    assert found(0.95, device=device(free=(8, 0.02, 8 << 20))) == []


def test_transfers_that_cost_most_are_the_verdict() -> None:
    one = entry(device=device(pageable=(8, 0.02, 8 << 20)))
    around = msgspec.convert({"gpu_busy": [0.95]}, Around)
    assert diagnose([one], 2, True, around, 1)[0] == "transfer-bound"
    assert diagnose([entry()], 2, True, around, 1)[0] == "healthy"


def test_a_step_that_waits_for_the_device() -> None:
    assert found(0.6, device=device(sync=(8, 0.05, 0))) == ["sync_transfer"]
    assert found(0.6, device=device(blocking=(8, 0.05, 8 << 20))) == ["sync_transfer"]
    assert found(0.98, device=device(sync=(8, 0.05, 0))) == []  # it computes all the time
    assert found(0.6, device=device(sync=(1, 0.05, 0))) == []  # now and then
    assert causes(cuda=True, gpus=1, device=device(sync=(8, 0.05, 0))) == []  # nobody knows whether it idles
    assert found(0.1, device=device(sync=(8, 0.001, 0))) == []  # it idles for the host, which hardly waits
    filled = {
        "filled_epochs": 1,
        "by_epoch": [[5, 1.0, 0.5, 0.1, 1.5], [50, 0.1, 0.9, 0.1, 1.0], [50, 0.1, 0.9, 0.1, 1.0]],
    }
    assert found(0.6, device=device(sync=(8, 0.05, 0)), **filled) == []  # in part while the cache was filled


def test_launches_that_rule() -> None:
    launches = {**fields()["stages"], "consumer": {"cpu_s": 0.95}}
    assert found(0.3, stages=launches, device=device()) == ["batch_too_small"]
    assert found(0.3, device=device()) == []  # the host does not compute, so it waits for something else
    assert found(0.9, stages=launches, device=device()) == []
    several = {**fields()["stages"], "consumer": {"cpu_s": 6.0}}
    assert found(0.3, stages=several, device=device()) == []  # several threads compute in the script's own code


def test_long_steps_in_which_the_device_computes() -> None:
    """``loss.item()`` every hundredth step waits for what was launched since the last one."""
    long = {"steps": {"count": 100, "median_s": 0.001, "p95_s": 0.001, "slow_count": 2, "slow_share": 0.9}}
    assert found(0.97, device=device(), **long) == []
    assert found(0.5, device=device(), **long) == ["checkpoint_or_logging"]


def test_page_locked_memory_that_leaves_none() -> None:
    changes: dict[str, Any] = {"settings": {"pin_memory": True}, "device": device(pinned=40 << 30)}
    assert found(0.95, 100 << 30, {"memory_available_min": 2 << 30}, **changes) == ["pin_memory_exhausts_ram"]
    assert found(0.95, 100 << 30, {"memory_available_min": 50 << 30}, **changes) == []
    assert found(0.95, 1000 << 30, {"memory_available_min": 2 << 30}, **changes) == []


def test_a_wait_that_does_not_starve_the_device() -> None:
    waits = {"wait_s": 0.5, "step_s": 0.5}
    assert LoaderStats(entry(**waits), 2).starved
    assert not LoaderStats(entry(**waits, device=device(gaps=50, starved=0.02)), 2).starved
    assert LoaderStats(entry(**waits, device=device(gaps=3, starved=0.02)), 2).starved  # too few to tell


def test_what_processes_saw_adds_up() -> None:
    def process(pid: int) -> dict[str, Any]:
        m = LoaderMetrics("train.py:3", batches=10, epochs=1, gaps=5, gap_s=0.1, gap_wait_s=0.2, crossing_steps=8)
        m.crossings = {"pageable train.py:9": [8, 0.02, 100]}
        return {"pid": pid, "threads": 1, "loaders": [vars(m)]}

    (both,) = merge.merged(merge.snapshots([process(1), process(2)]))
    assert both.device.gaps == 10
    assert both.device.starved_share_of_wait == pytest.approx(0.5)
    assert both.device.crossings == [Crossing("pageable", "train.py:9", 16, 0.04, 200)]


def test_a_report_has_each_number_of_its_loader() -> None:
    metrics = LoaderMetrics("train.py:3")
    numbers = [f.name for f in fields_of(LoaderReport) if f.type in (int, float) and hasattr(metrics, f.name)]
    for value, name in enumerate(numbers, 2):
        setattr(metrics, name, type(getattr(metrics, name))(value))
    metrics.loop_s = 100.0  # at least the waits and steps
    (report,) = merge.merged(merge.snapshots([{"pid": 1, "threads": 1, "loaders": [vars(metrics)]}]))
    assert {"batches", "samples", "epochs", "wait_s", "step_s", "loop_s"} <= set(numbers)
    assert {name: getattr(report, name) for name in numbers} == {name: getattr(metrics, name) for name in numbers}
