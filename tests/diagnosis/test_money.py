"""What waiting costs: the user's prices, times what the report says."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.commands import main
from stoker.diagnosis.doctor.verdict import diagnose
from stoker.diagnosis.report import money, text
from stoker.diagnosis.report.prices import Money, Prices
from stoker.diagnosis.report.schema import Finding, Ranks, RankWait, RunReport
from tests.diagnosis.helpers import entry, fields

HALF = {"wait_s": 1.0, "step_s": 1.0, "stages": {"startup": {"wait_s": 0.0}}}
# Two workers use both cores all the time, and the loop waits for five sixths of its own.
ALL_CORES = {
    "wait_s": 5.0,
    "step_s": 1.0,
    "stages": {
        "fetch": {"self_s": 11.0},
        "worker": {"cpu_s": 11.0, "tasks": 100},
        "consumer": {"cpu_s": 0.1},
        "startup": {"wait_s": 0.0},
    },
}


def report(*loaders: dict[str, Any], **changes: Any) -> RunReport:
    found = [entry(**loader) for loader in loaders]
    verdict, findings = diagnose(found, 2, False)
    out = RunReport(["train.py"], 0, 10.0, found, verdict, findings, {"cores": 2, "gpus": []})
    return msgspec.structs.replace(out, **changes)


def of(found: RunReport, gpu: float = 2.0, gpus: int = 0, cpu: float | None = None) -> Money:
    out = money.of(found, Prices(gpu, gpus, cpu))
    assert out is not None
    return out


def said(found: RunReport, out: Money) -> str:
    return " ".join(text.render(msgspec.structs.replace(found, money=out), None, io.StringIO()).split())


def test_a_loop_that_waits_half_its_time_wastes_half_a_days_price() -> None:
    found = report(HALF)
    out = of(found, 2.0, 8)
    assert out.waiting_share == pytest.approx(0.5)
    assert out.waiting_per_day == pytest.approx(0.5 * 24 * 2.0 * 8)
    assert "waiting for data costs 192.00 a day: 50% of 8 GPUs at 2.00 an hour" in said(found, out)


def test_first_batches_count_and_waiting_beside_a_busy_device_does_not() -> None:
    first = {**HALF, "stages": {"startup": {"wait_s": 0.5}}}
    assert of(report(first)).waiting_share == pytest.approx(0.5)
    seen = {**first, "device": {"gaps": 50, "starved_share_of_wait": 0.0}}
    assert of(report(seen)).waiting_share == pytest.approx(0.25)


def test_the_number_of_gpus_is_the_machines_and_at_least_one() -> None:
    assert of(report(HALF)).prices.gpus == 1
    assert of(report(HALF, machine={"cores": 2, "gpus": [{}, {}]})).prices.gpus == 2
    assert of(report(HALF, machine={"cores": 2, "gpus": [{}, {}]}), gpus=3).prices.gpus == 3


def test_a_fix_saves_what_the_loop_takes_less() -> None:
    findings = [
        Finding("a", 0.4, predicted_speedup=2.0, loader="train.py:3", change={"num_workers": 4}),
        Finding("code", 0.4, predicted_speedup=2.0, loader="train.py:3"),
        Finding("b", 0.1, loader="train.py:3"),
        Finding("c", 0.9, loader="train.py:3", applied=True, measured_speedup=4.0),
    ]
    found = report(HALF, findings=findings)
    out = of(found)
    assert [(s.per_day, s.at_most, s.applied) for s in out.savings] == [
        (pytest.approx(24.0), False, False),
        (pytest.approx(24.0), True, False),
        (pytest.approx(4.8), True, False),
        (pytest.approx(36.0), False, True),
    ]
    words = said(found, out)
    assert (
        "a: its fix saves 24.00 a day code: its fix saves at most 24.00 a day b: its fix saves at most 4.80 a day c: applied, saves 36.00 a day"
        in words
    )
    assert "these overlap" in words


def test_a_loader_counts_by_its_part_of_the_time() -> None:
    other = {"name": "train.py:9", "wait_s": 0.0, "step_s": 6.0, "stages": {"startup": {"wait_s": 0.0}}}
    out = of(report(HALF, other, findings=[Finding("a", 0.4, predicted_speedup=2.0, loader="train.py:3")]))
    assert out.waiting_share == pytest.approx(1 / 8)
    assert out.savings[0].per_day == pytest.approx(0.25 * 24.0)


def test_more_cores_end_the_waiting() -> None:
    found = report(ALL_CORES)
    out = of(found)
    (more,) = out.more_cores
    assert more.cores == 12 - 2  # 11.1 s of CPU in the 1 s of all steps
    assert more.saves_per_day == pytest.approx(48 * 5 / 6)
    assert more.break_even == pytest.approx(more.saves_per_day / 10 / 24)
    assert more.costs_per_day is None
    assert "10 more CPU cores for train.py:3 would save 40.00 a day: cheaper than waiting GPUs while" in said(
        found, out
    )


def test_with_a_price_of_cores_the_number_that_pays_most_is_named() -> None:
    found = report(ALL_CORES)
    cheap, dear, absurd = (of(found, cpu=price).more_cores[0] for price in (0.001, 0.1, 100.0))
    assert cheap.cores == 10
    assert 1 <= dear.cores < 10
    assert dear.costs_per_day == pytest.approx(24 * dear.cores * 0.1)
    for cores in range(1, 11):  # no other number pays more
        then = max(0.01, 0.111 / (2 + cores))
        assert dear.saves_per_day - dear.costs_per_day >= 48 * (1 - then / 0.06) - 2.4 * cores - 1e-9
    assert absurd.cores == 1
    assert "cheaper than waiting GPUs" in said(found, of(found, cpu=0.001))
    assert "waiting GPUs are cheaper" in said(found, of(found, cpu=100.0))


def test_cores_are_named_only_where_the_workers_use_all_there_are() -> None:
    idle = {**ALL_CORES, "stages": {**ALL_CORES["stages"], "worker": {"cpu_s": 1.0, "tasks": 100}}}  # type: ignore[dict-item]
    idle["kernel"] = {"cpu_ns": 0}
    assert of(report(idle)).more_cores == []
    assert of(report({**ALL_CORES, "wait_s": 0.0})).more_cores == []
    two = {**ALL_CORES, "settings": {"processes": 2}}
    assert of(report(two)).more_cores == []  # two processes, one after the other or at once
    ranks = Ranks([RankWait(0), RankWait(1)])
    assert of(report(two, ranks=ranks)).more_cores[0].cores > of(report(ALL_CORES)).more_cores[0].cores


def test_without_a_loop_there_is_no_money() -> None:
    assert money.of(report(), Prices(2.0)) is None


times = st.floats(0, 1e6)


@given(
    wait=times,
    step=times,
    first=times,
    gain=st.none() | st.floats(0.01, 1e3),
    share=st.floats(0, 1),
    cpu=st.none() | st.floats(1e-6, 1e3),
)
def test_nothing_costs_or_saves_more_than_a_day(
    wait: float, step: float, first: float, gain: float | None, share: float, cpu: float | None
) -> None:
    loader = fields(wait_s=wait + first, step_s=step, stages={**ALL_CORES["stages"], "startup": {"wait_s": first}})  # type: ignore[dict-item]
    finding = Finding("a", share, predicted_speedup=gain, loader="train.py:3")
    out = money.of(report(loader, findings=[finding]), Prices(2.0, 4, cpu))
    if out is None:
        assert not wait + step + first
        return
    day = 24 * 2.0 * 4 * (1 + 1e-9)
    assert 0 <= out.waiting_per_day <= day
    assert all(
        0 <= saved <= day for saved in (*(s.per_day for s in out.savings), *(m.saves_per_day for m in out.more_cores))
    )
    assert list(money.sentences(out))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--gpu-price", "0"], "'0' is not an hourly price"),
        (["--gpu-price", "-1"], "'-1' is not an hourly price"),
        (["--gpu-price", "nan"], "'nan' is not an hourly price"),
        (["--gpu-price", "2,10"], "'2,10' is not an hourly price"),
        (["--gpu-price", "1e9"], "'1e9' is not an hourly price"),
        (["--gpu-price", "2", "--gpus", "0"], "'--gpus'"),
        (["--gpu-price", "2", "--cpu-price", "free"], "'free' is not an hourly price"),
        (["--gpus", "8"], "--gpus and --cpu-price need --gpu-price"),
        (["--cpu-price", "0.04"], "--gpus and --cpu-price need --gpu-price"),
    ],
)
def test_wrong_prices(options: list[str], why: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert main.main(["run", *options, str(script)]) == 2
    assert why in capfd.readouterr().err
    assert not (tmp_path / "ran").exists()
