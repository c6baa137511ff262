"""The tuner: what it measures, what it answers, and what it says of what cannot be tuned."""

from __future__ import annotations

import html
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

import stoker
from stoker.commands import main
from stoker.core.errors import UsageError
from stoker.core.options import Budget
from stoker.diagnosis.report import html as report_html
from stoker.loader.auto import limits as limits_
from stoker.loader.auto.bench import BenchWindow
from stoker.loader.auto.limits import limits
from stoker.loader.auto.tasks import MeasuringTasks
from stoker.loader.variant import as_loader, find
from stoker.tuning.curve import Point, svg
from stoker.tuning.guesses import Guess
from stoker.tuning.knobs import KNOBS
from stoker.tuning.measurements import Measurements
from stoker.tuning.result import Setting, TuneResult
from stoker.tuning.search import TunerSearch


class Rows(Dataset):
    def __init__(self, n: int = 400) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor(float(i))


class Waits(Rows):
    """A slow disk: time passes, no core is busy."""

    def __getitem__(self, i: int) -> torch.Tensor:
        time.sleep(0.002)
        return torch.tensor(float(i))


class Burns(Rows):
    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor(float(sum(range(15_000))))


class Fails(Rows):
    def __getitem__(self, i: int) -> torch.Tensor:
        if i == 7:
            raise ValueError("a truncated file")
        return torch.tensor(float(i))


class Leaves(Fails):
    def __getitem__(self, i: int) -> torch.Tensor:
        if i == 7:
            sys.exit(3)
        return torch.zeros(4)


class Unmeasured(Rows):
    def __len__(self) -> int:
        raise RuntimeError("not today")


class Stream(IterableDataset):
    def __init__(self, n: int | None) -> None:
        self.n = n

    def __iter__(self) -> Any:
        i = 0
        while self.n is None or i < self.n:
            yield torch.tensor(float(sum(range(2000)) + i))
            i += 1


def children() -> set[int]:
    import psutil

    return {p.pid for p in psutil.Process().children(recursive=True)}


# ---------------------------------------------------------------------------------------------------------- the answer


@pytest.mark.slow
def test_what_waits_gets_many_workers_and_says_what_bound_them() -> None:
    before = children()
    r = stoker.tune(DataLoader(Waits(), batch_size=4, shuffle=True), budget_s=5, knobs=("num_workers",))
    assert r.best.num_workers > 2
    assert r.rate > 0
    assert r.low <= r.rate * 1.001
    assert r.high >= r.rate * 0.999
    one = next(p for p in r.curve if p.workers == 1)
    assert r.rate > 2 * one.rate
    assert f"num_workers={r.best.num_workers}" in r.lines["torch"]
    assert r.limits[0].most >= r.best.num_workers
    assert children() <= before


@pytest.mark.slow
def test_no_more_workers_than_help() -> None:
    r = stoker.tune(DataLoader(Burns(), batch_size=8), budget_s=2)
    assert r.best.num_workers <= r.limits[0].most
    assert r.seconds < 30
    assert set(r.reasons) >= {"num_workers", "pin_memory"}


Rate = Callable[[Setting], float]


def say_rates(monkeypatch: pytest.MonkeyPatch, rate: Rate) -> None:
    """Each window says what ``rate`` does."""

    def measure(self: Measurements, s: Setting) -> float:
        self.rates.setdefault(s, []).append(rate(s))
        self.windows[s] = BenchWindow(rate=100.0, batches=10, work_s=0.01, make_s=0.01, cpu_s=0.01, nbytes=64)
        self.tried.append({"num_workers": s.num_workers})
        return self.rates[s][-1]

    monkeypatch.setattr(Measurements, "measure", measure)


def searched(
    monkeypatch: pytest.MonkeyPatch, rate: Rate, knobs: tuple[str, ...] = ("num_workers",), most: int = 16
) -> tuple[TunerSearch, Setting]:
    say_rates(monkeypatch, rate)
    monkeypatch.setattr("stoker.tuning.search.limits", lambda **_: [limits_.Limit("cores", most, "")])
    measured = Measurements(DataLoader(Waits(), batch_size=4), 30, lambda _: None)
    search = TunerSearch(measured, "Waits", knobs)
    try:
        return search, search.run()
    finally:
        measured.close()


@pytest.mark.parametrize("knee", [1, 2, 3, 6, 16])
def test_the_knee_is_found(knee: int, monkeypatch: pytest.MonkeyPatch) -> None:
    search, best = searched(monkeypatch, lambda s: 100.0 * max(0.4, min(s.num_workers, knee)))
    assert best.num_workers == knee
    assert len(search.measured.rates[best]) >= 3
    assert search.reasons["num_workers"] == f"{knee} is the smallest within 3 % of the best"


def test_one_window_that_was_too_good_does_not_win(monkeypatch: pytest.MonkeyPatch) -> None:
    lucky = iter([300.0])

    def rate(s: Setting) -> float:
        return next(lucky, 150.0) if s.num_workers == 4 else 100.0 * max(0.5, min(s.num_workers, 2))

    _, best = searched(monkeypatch, rate)
    assert best.num_workers == 2


@pytest.mark.parametrize("knee", [2, 8, 64])
def test_on_a_noisy_machine_it_stays_within_5_percent_of_the_best(knee: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that spread by 4 %, on a machine that gets slower and faster by 10 % now and then; 38 windows in all."""

    def true(s: Setting) -> float:
        rate = 100.0 * max(0.7, min(s.num_workers, knee))
        return rate * (1 + 0.01 * math.log2(s.prefetch_factor))

    most = min(32, 2 * knee)
    best = max(true(Setting(n, prefetch_factor=8)) for n in range(most + 1))
    shares = []
    for seed in range(40):
        r, mood, windows = random.Random(seed), [1.0], [0]

        def rate(s: Setting, r: random.Random = r, mood: list[float] = mood, windows: list[int] = windows) -> float:
            windows[0] += 1
            if r.random() < 0.15:
                mood[0] = r.gauss(1.0, 0.1)
            return true(s) * r.gauss(1.0, 0.04) * mood[0]

        monkeypatch.setattr(Measurements, "is_over", lambda self, w=windows: w[0] >= 38)
        shares.append(true(searched(monkeypatch, rate, KNOBS[:2], most)[1]) / best)
    assert sum(shares) / len(shares) > 0.95
    assert sorted(shares)[4] > 0.94  # nine of ten runs


def test_every_knob_but_those_asked_for_stays() -> None:
    loader = DataLoader(Waits(), batch_size=4, num_workers=2, prefetch_factor=3)
    r = stoker.tune(loader, budget_s=0.5, knobs=("pin_memory",))
    assert r.best.num_workers == 2
    assert r.best.prefetch_factor == 3
    assert r.best.batch_size == 4
    assert {t["num_workers"] for t in r.tried} <= {1, 2}
    assert set(r.reasons) <= {"pin_memory"}


@pytest.mark.slow
def test_the_loader_and_all_random_state_stay_as_they_are() -> None:
    dataset = Rows()
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(dataset, batch_size=10, shuffle=True, generator=generator)
    torch.manual_seed(1)
    random.seed(1)
    before = torch.get_rng_state(), random.getstate(), generator.get_state()
    stoker.tune(loader, budget_s=1)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert torch.equal(generator.get_state(), before[2])
    assert loader.num_workers == 0


@pytest.mark.slow
@pytest.mark.parametrize("n", [50, None], ids=["short", "endless"])
def test_iterable_datasets(n: int | None) -> None:
    before = children()
    r = stoker.tune(DataLoader(Stream(n), batch_size=5), budget_s=1)
    assert r.best.num_workers == 1  # more would give all samples as often
    assert any("get_worker_info" in note for note in r.notes)
    assert children() <= before


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Rows(), batch_sampler=BatchSampler(RandomSampler(Rows()), 7, False)),
        lambda: DataLoader(Rows(), batch_size=None),
        lambda: stoker.DataLoader(Rows(), batch_size=4, num_workers="auto"),
        lambda: stoker.DataLoader(Rows(), batch_size=4, worker_method="thread", num_workers=2),
        lambda: DataLoader(Rows(3), batch_size=8),
        lambda: Rows,
    ],
    ids=["batch_sampler", "no batches", "auto", "threads", "few samples", "class"],
)
def test_all_kinds_of_loaders(make: Any) -> None:
    r = stoker.tune(make(), budget_s=1)
    assert r.rate > 0
    assert "num_workers=" in r.lines["torch"]
    assert r.lines["stoker"].startswith("stoker.DataLoader(dataset")


@pytest.mark.slow
def test_the_result_for_people_and_machines() -> None:
    r = stoker.tune(Rows(), budget_s=1)
    assert "to paste" in str(r)
    assert "<- the knee" in str(r)
    assert "to paste" in r._repr_html_()
    d = json.loads(json.dumps(r.as_dict()))
    assert d["schema"] == 2
    assert d["best"]["num_workers"] == r.best.num_workers


# ----------------------------------------------------------------------------------------------------------- guesses


def guessed(
    monkeypatch: pytest.MonkeyPatch,
    rate: Rate,
    most: int = 16,
    cores: int = 6,
    knobs: tuple[str, ...] = ("num_workers",),
    **changes: Any,
) -> TuneResult:
    """The result of a search on a machine with 2 GPUs; ``changes`` are attributes of ``Measurements``."""
    monkeypatch.setattr("stoker.tuning.search.resources.cores_granted", lambda: cores)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    search, best = searched(monkeypatch, rate, knobs, most)
    for name, value in changes.items():
        monkeypatch.setattr(search.measured, name, value)
    return search.result(best)


def test_each_guess_is_beside_the_knee(monkeypatch: pytest.MonkeyPatch) -> None:
    r = guessed(monkeypatch, lambda s: 100.0 * max(0.5, min(s.num_workers, 3)))
    assert {g.name: (g.workers, g.rate, g.why) for g in r.guesses} == {
        "4 workers a GPU": (8, 300.0, ""),
        "the cores": (6, 300.0, ""),
        "batch size over GPUs": (2, 200.0, ""),  # batches of 4
        "batch size over cores": (1, 100.0, ""),
        "entries x batch x workers = GPUs x throughput": (
            2 * 300 // (r.best.prefetch_factor * 4),
            None,
            "more than the limit of 16 (cores)",
        ),
    }
    assert all(g.formula for g in r.guesses)
    assert {g.workers for g in r.guesses if g.rate} <= {p.workers for p in r.curve}
    text = str(r)
    assert re.search(r"2 +200 +67% +batch size over GPUs\n", text)
    assert "not measured: more than the limit of 16 (cores)" in text
    assert max(map(len, text.splitlines())) <= 80
    assert [g["name"] for g in json.loads(json.dumps(r.as_dict()))["guesses"]] == [g.name for g in r.guesses]


def test_a_guess_never_moves_the_knee(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search skips 7 workers; one lucky window of a guess proves nothing."""
    r = guessed(
        monkeypatch, lambda s: 900.0 if s.num_workers == 7 else 100.0 * max(0.5, min(s.num_workers, 3)), cores=7
    )
    assert next(g.rate for g in r.guesses if g.name == "the cores") == 900.0
    assert (r.best.num_workers, r.rate) == (3, 300.0)


def test_without_time_a_guess_has_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    r = guessed(monkeypatch, lambda s: 100.0, cores=7, has_time_for_one=lambda: False)
    cores = next(g for g in r.guesses if g.name == "the cores")
    assert (cores.workers, cores.rate, cores.why) == (7, None, "no time was left")
    assert 7 not in {p.workers for p in r.curve}


def test_where_workers_may_not_move_nothing_is_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    r = guessed(monkeypatch, lambda s: 100.0, knobs=("prefetch_factor",))
    assert not r.guesses
    assert "first guess" not in str(r)


# -------------------------------------------------------------------------------------------------------- the drawing


POINTS = [
    Point(0, 500.0, 480.0, 510.0, 3),
    Point(1, 430.0, 430.0, 430.0, 1),
    Point(2, 800.0, 780.0, 850.0, 4),
    Point(4, 1500.0, 1400.0, 1650.0, 4),
]
GUESSES = [
    Guess("4 workers a GPU", "4 x GPUs", 4, 1500.0),
    Guess("the cores", "cores", 2, 800.0),
    Guess("<b>", "", 2, 800.0),
    Guess("too many", "", 99, None, "more than the limit"),
]


def test_the_drawing_has_each_point_with_its_range_the_knee_and_the_guesses() -> None:
    text = svg(POINTS, 4, GUESSES)
    picture = ElementTree.fromstring(text[: text.index("</svg>") + 6])
    centres = [float(c.get("cy", "")) for c in picture.iter("circle")]
    assert len(centres) == len(POINTS)
    assert sorted(centres, reverse=True) == [centres[1], centres[0], centres[2], centres[3]]  # more is higher
    assert [t.text for t in picture.iter("title")][-1] == "4 workers: 1,500 samples/s [1,400..1,650], windows: 4"
    words = [t.text for t in picture.iter("text")]
    assert [w for w in words if w in ("the knee", "A", "B", "C", "BC")] == ["A", "BC", "the knee"]
    assert {"0", "500", "1,000", "1,500"} <= set(words)
    assert "too many" not in text
    assert "&lt;b&gt;: 2 workers" in text


@pytest.mark.parametrize(
    "points", [POINTS[:1], POINTS[1:2], [Point(1, 0.0, 0.0, 0.0, 1)], [Point(n, 1e9, 1e9, 1e9, 1) for n in range(200)]]
)
def test_every_curve_can_be_drawn(points: list[Point]) -> None:
    text = svg(points, points[0].workers, [])
    numbers = [float(x) for x in re.findall(r' (?:x|y|cx|cy)="([-0-9.]+)"', text)]
    assert all(0 <= x <= 640 for x in numbers)


def test_the_page_has_the_drawing_and_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    r = replace(guessed(monkeypatch, lambda s: 100.0 * max(0.5, min(s.num_workers, 3))), name="<script>x</script>")
    report_html.save_tuned(r, tmp_path / "tune.html")
    page = (tmp_path / "tune.html").read_text()
    assert r.drawing() in page
    assert html.escape(r.lines["torch"]) in page
    assert "<script>" not in page
    assert "3 workers: 300 samples a second" in page
    cells = re.sub(r' data-label="[^"]*"', "", page)
    assert "<td>batch size / cores</td><td>1</td><td>100</td><td>33%</td>" in cells
    assert "was not measured: more than the limit of 16 (cores)" in page
    assert not re.search(r"https?:|src=|href=|<link", page)
    assert r.drawing() in r._repr_html_()


# -------------------------------------------------------------------------------------------------------- batch size

BATCHED = ("num_workers", "prefetch_factor", "batch_size")


@pytest.mark.parametrize(("best", "pays"), [(32, 1.5), (4, 1.01), (2, 1.5), (1, 1.5)])
def test_the_batch_size_moves_only_where_that_pays(best: int, pays: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step towards ``best`` makes ``pays`` times the samples/s; the loader's own is 4."""

    def rate(s: Setting) -> float:
        assert s.batch_size is not None
        return 100.0 * min(s.num_workers or 0.5, 3) * pays ** -abs(math.log2(s.batch_size / best))

    r = guessed(monkeypatch, rate, knobs=BATCHED)
    assert (r.best.batch_size, r.best.num_workers) == (best, 3)
    assert f"batch_size={best}" in r.lines["torch"]
    assert f"batch_size {best}," in str(r)
    assert any("changes the training" in note for note in r.notes)
    assert "batch_size" in r.reasons
    assert {p.workers for p in r.curve} >= {2, 3}


def test_no_batch_is_larger_than_the_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    search, best = searched(monkeypatch, lambda s: float(s.batch_size or 0), BATCHED)
    assert best.batch_size == 256  # of 400 samples
    assert max(s.batch_size or 0 for s in search.measured.rates) == 256


def test_no_batch_is_larger_than_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of 4 has 64 bytes, and 4 of them are in flight for one worker."""
    monkeypatch.setattr(
        "stoker.tuning.measurements.engine.budget", lambda _: Budget(lease_bytes=0, flight_bytes=4 * 64 * 8)
    )
    monkeypatch.setattr(TunerSearch, "_is_cheap", lambda self: True)
    _, best = searched(monkeypatch, lambda s: float(s.batch_size or 0), ("batch_size", "prefetch_factor"))
    assert (best.batch_size, best.prefetch_factor) == (32, 4)


def test_larger_batches_leave_room_for_fewer_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    say_rates(monkeypatch, lambda s: float((s.batch_size or 0) * max(0.5, s.num_workers)))
    found = [limits_.Limit("cores", 16, ""), limits_.Limit("shm", 24, "")]
    monkeypatch.setattr("stoker.tuning.search.limits", lambda **_: found)
    measured = Measurements(DataLoader(Waits(), batch_size=4), 30, lambda _: None)
    search = TunerSearch(measured, "Waits", BATCHED)
    search.run()
    assert len({s.batch_size for s in measured.rates}) > 1
    assert all(s.num_workers * (s.batch_size or 0) <= 24 * 4 for s in measured.rates)
    assert [b.name for b in search.limits_for(4)] == ["cores", "shm"]
    assert [(b.name, b.most) for b in search.limits_for(8)] == [("shm", 12), ("cores", 16)]


def test_the_search_goes_round_until_no_knob_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only large batches keep many workers busy, and many workers want large batches."""

    def rate(s: Setting) -> float:
        return 100.0 * min(s.num_workers or 0.5, (s.batch_size or 0) / 2) * min(s.batch_size or 0, 32) ** 0.1

    _, best = searched(monkeypatch, rate, BATCHED)
    assert (best.num_workers, best.batch_size) == (16, 32)  # after one round: 2 workers


@pytest.mark.slow
def test_windows_have_the_batch_size_that_they_stand_for() -> None:
    loader = DataLoader(TensorDataset(torch.zeros(400, 1000)), batch_size=4, shuffle=True)
    measured = Measurements(loader, 20, lambda _: None)
    try:
        for size in (4, 16, 2, 4):
            measured.measure(Setting(1, batch_size=size))
            tasks = [measured.bench.tasks() for _ in range(20)]
            assert {len(task) for task in tasks} == {size}
            assert measured.windows[Setting(1, batch_size=size)].nbytes // 4000 == size
            measured.tasks.fresh = False
        own = {i for task in measured.tasks._kept for i in task}
        assert {i for other in measured._resized.values() for task in other._kept for i in task} <= own
    finally:
        measured.close()
    assert loader.batch_size == 4


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Rows(), batch_size=None),
        DataLoader(Rows(), batch_sampler=BatchSampler(RandomSampler(Rows()), 7, False)),
    ],
    ids=["no batches", "batch_sampler"],
)
def test_a_loader_that_makes_its_own_batches_keeps_their_size(loader: Any) -> None:
    with pytest.raises(UsageError, match=r"the loader makes its own batches .*, so their size cannot be changed"):
        stoker.tune(loader, knobs=("batch_size",))


def test_a_stream_keeps_its_batch_size() -> None:
    r = stoker.tune(DataLoader(Stream(50), batch_size=5), budget_s=0.5, knobs=("batch_size",))
    assert {t["batch_size"] for t in r.tried} == {5}
    assert any("no other batch size is tried" in note for note in r.notes)


@pytest.mark.slow
def test_a_batch_size_is_found_by_real_windows() -> None:
    r = stoker.tune(DataLoader(Rows(), batch_size=2, shuffle=True), budget_s=3, knobs=(*KNOBS, "batch_size"))
    assert len({t["batch_size"] for t in r.tried}) > 1
    assert r.best.batch_size is not None
    assert f"batch_size={r.best.batch_size}" in r.lines["torch"]


# ------------------------------------------------------------------------------------------------------------ limits


def test_what_would_not_fit_is_never_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits_.resources, "workers_bound", lambda each: (2, f"{each} bytes each"))
    say_rates(monkeypatch, lambda s: 100.0 * max(0.5, s.num_workers))
    r = stoker.tune(DataLoader(Waits(), batch_size=4), budget_s=4)
    assert max(t["num_workers"] for t in r.tried) <= 2
    assert r.bound is not None
    assert r.bound.name == "memory"
    assert "bytes each" in str(r)


def test_limits_name_their_numbers() -> None:
    budget = stoker.core.options.Budget(lease_bytes=0, flight_bytes=100 << 20)
    found = limits(waits=0.0, each=1 << 30, nbytes=50 << 20, prefetch=2, budget=budget, shm=True, pinned=True)
    assert {b.name for b in found} == {"cores", "memory", "budget", "shm", "pinned"}
    assert [b.most for b in found] == sorted(b.most for b in found)
    assert next(b for b in found if b.name == "budget").most == 1
    waiting = limits(waits=0.9, each=1, nbytes=1, prefetch=1, budget=budget)
    assert max(b.most for b in waiting if b.name == "cores") > max(b.most for b in found if b.name == "cores")


def test_tasks_are_drawn_again_only_when_there_are_enough() -> None:
    tasks = MeasuringTasks(DataLoader(Rows(1000), batch_size=10, shuffle=True))
    fresh = [tuple(tasks()) for _ in range(15)]
    tasks.fresh = False
    assert not tasks.has_enough
    fresh.append(tuple(tasks()))
    assert tasks.has_enough
    assert {tuple(tasks()) for _ in range(50)} <= set(fresh)
    assert tasks.samples == 10
    runs = MeasuringTasks(DataLoader(Rows(25), batch_size=10))
    assert [runs()[0] for _ in range(4)] == [0, 10, 20, 0]


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        (Rows(0), "is empty"),
        (DataLoader(Stream(0)), "Stream is empty"),
        (5, "of type int, not a Dataset or a DataLoader"),
        ("text", "of type str, not"),
        (lambda: 1 / 0, "ZeroDivisionError"),
        (lambda: None, "not a Dataset"),
        (
            DataLoader(Fails(8), batch_size=4),
            r"a sample cannot be loaded: ValueError: a truncated file \(while loading sample 7\)",
        ),
        (
            DataLoader(Leaves(8), batch_size=4),
            "a sample cannot be loaded: it killed a worker: .* stoker verify names the sample",
        ),
        (DataLoader(Rows(), batch_sampler=[]), "yields no batches"),
        (Unmeasured(), "failed: RuntimeError: not today"),
    ],
    ids=[
        "empty",
        "empty stream",
        "number",
        "text",
        "raises",
        "returns nothing",
        "bad sample",
        "leaves",
        "no batches",
        "no length",
    ],
)
def test_what_cannot_be_tuned(thing: Any, words: str) -> None:
    before = children()
    with pytest.raises(UsageError, match=words):
        stoker.tune(thing, budget_s=2)
    assert children() <= before


def test_wrong_arguments() -> None:
    with pytest.raises(UsageError, match="unknown knob 'workers': choose from num_workers"):
        stoker.tune(Rows(), knobs=("workers",))
    with pytest.raises(UsageError, match=r"budget_s must be .*, not 0"):
        stoker.tune(Rows(), budget_s=0)
    with pytest.raises(UsageError, match="so their size cannot be changed"):
        as_loader(DataLoader(Rows(), batch_size=None), batch_size=4)


class Sleeps(Rows):
    def __getitem__(self, i: int) -> torch.Tensor:
        time.sleep(60)
        return torch.tensor(0.0)


@pytest.mark.slow
def test_a_batch_slower_than_the_budget() -> None:
    before = children()
    began = time.monotonic()
    with pytest.raises(UsageError, match="longer than the 1 s"):
        stoker.tune(DataLoader(Sleeps()), budget_s=1)
    assert time.monotonic() - began < 30
    assert children() <= before


# ----------------------------------------------------------------------------------------------------- the command line


SCRIPT = """
    import time
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Slow(Dataset):
        def __len__(self):
            return 300
        def __getitem__(self, i):
            time.sleep(0.001)
            return torch.tensor(i)

    class Cuda(Slow):
        def __getitem__(self, i):
            return torch.zeros(1).cuda()

    dataset = Slow()
    def make():
        return DataLoader(dataset, batch_size=4, shuffle=True)

    if __name__ == "__main__":
        raise SystemExit("it was run")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``SCRIPT`` lies in the current folder, as train.py."""
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "train", raising=False)
    yield
    sys.modules.pop("train", None)


@pytest.mark.slow
@pytest.mark.usefixtures("script")
def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = [
        sys.executable,
        "-m",
        "stoker",
        "tune",
        "train.py:make",
        "--time-limit",
        "1",
        "--json",
        "t.json",
        "--html",
        "t.html",
    ]
    p = subprocess.run(line, capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "60"})
    assert p.returncode == 0, p.stderr
    assert "<- the knee" in p.stdout
    assert "DataLoader(dataset, batch_size=4, shuffle=True, num_workers=" in p.stdout
    assert "batch size over cores" in p.stdout
    assert p.stdout.strip().splitlines()[0].partition(" workers")[0] in (tmp_path / "t.html").read_text()
    assert "\033" not in p.stdout + p.stderr
    assert json.loads((tmp_path / "t.json").read_text())["best"]["batch_size"] == 4
    assert main.main(["tune", "train:dataset", "--time-limit", "1", "--json", "-", "--knobs", "num_workers"]) == 0
    assert json.loads(capfd.readouterr().out)["best"]["batch_size"] == 32


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["train.py"], "TARGET is path.py:name"),
        (["nowhere.py:make"], "file nowhere.py does not exist"),
        (["nowhere:make"], "no module named 'nowhere'"),
        (["train.py:nothing"], "train.py has no 'nothing'"),
        (["train.py:time"], "of type module, not a Dataset or a DataLoader"),
        (["train.py:Cuda"], "cannot be loaded"),
        (["train.py:make", "--json", "no/where.json"], "directory no does not exist"),
        (["train.py:make", "--html", "no/where.html"], "directory no does not exist"),
        (["train.py:make", "--knobs", "x"], "unknown knob 'x'"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, list) else "",
)
@pytest.mark.usefixtures("script")
def test_the_command_says_what_is_wrong(args: list[str], words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main.main(["tune", *args]) == 2
    said = capfd.readouterr()
    assert words in said.err
    assert "Traceback" not in said.err


@pytest.mark.usefixtures("script")
def test_a_page_needs_the_extra(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert main.main(["tune", "train.py:make", "--html", "t.html"]) == 2
    assert "--html needs jinja2: pip install 'stoker[html]'" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_an_interrupted_command_leaves_nobody(tmp_path: Path, how: signal.Signals) -> None:
    import psutil

    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    line = [sys.executable, "-m", "stoker", "tune", "train.py:make", "--time-limit", "60"]
    p = subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    found: list[psutil.Process] = []
    deadline = time.monotonic() + 60
    while len(found) < 3 and time.monotonic() < deadline and p.poll() is None:
        found = psutil.Process(p.pid).children(recursive=True)
    assert len(found) >= 3
    found = psutil.Process(p.pid).children(recursive=True)
    p.send_signal(how)
    out, err = p.communicate(timeout=60)
    assert p.returncode == (130 if how == signal.SIGINT else -how)
    assert "Traceback" not in err
    assert not out
    _, alive = psutil.wait_procs(found, timeout=60)
    assert not alive


@pytest.mark.slow
def test_a_single_knob() -> None:
    loader = DataLoader(Rows(), batch_size=4, num_workers=2, prefetch_factor=4)
    r = stoker.tune(loader, budget_s=1, knobs=("prefetch_factor",))
    assert r.best.num_workers == 2
    assert set(r.reasons) <= {"prefetch_factor"}


def test_find_names_modules_too() -> None:
    assert find("torch.utils.data:TensorDataset") is torch.utils.data.TensorDataset
