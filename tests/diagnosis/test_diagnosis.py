"""The labelled suite, and that its table is about what lies there."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.diagnosis.doctor.verdict import CAUSES

from .__main__ import HERE, TRUTH, NotHere, report, right

QUICK = ("slow_transform_composed",)


def found(name: str) -> list[str]:
    try:
        return [f["cause"] for f in report(name)["findings"]]
    except NotHere:
        pytest.skip("cannot be planted on this machine")


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_what_was_planted_is_found(name: str) -> None:
    causes = found(name)
    assert right(name, causes), causes


@pytest.mark.planted
@pytest.mark.parametrize("name", [n for n in TRUTH if n not in QUICK])
def test_all_that_was_planted_is_found(name: str) -> None:
    causes = found(name)
    assert right(name, causes), causes


def test_the_table_of_truth() -> None:
    scripts = {p.stem for p in (HERE / "cases").glob("*.py")} - {"planted"}
    assert scripts == set(TRUTH)
    assert len(TRUTH) >= 30
    assert sum(not causes for causes in TRUTH.values()) >= 6
    assert {c for causes in TRUTH.values() for c in causes} == set(CAUSES)
    for script in scripts:
        assert "stoker" not in Path(HERE / "cases" / f"{script}.py").read_text()


def test_what_counts_as_right() -> None:
    assert right("healthy_stream", [])
    assert not right("healthy_stream", ["stragglers"])
    assert right("transform_and_decode", ["slow_transform", "slow_decode", "stragglers"])
    assert not right("transform_and_decode", ["slow_transform", "stragglers", "slow_decode"])
    assert not right("slow_collate", [])
