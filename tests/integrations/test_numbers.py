"""The numbers that are logged: what was added between two readings, and what is made of several ranks."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.core.metrics import LoaderMetrics
from stoker.integrations.numbers import CODES, Numbers, Totals, between, combined, numbers, totals

seconds = st.one_of(st.just(0.0), st.floats(1e-6, 1e4))
counts = st.integers(0, 10**6)
loaders = st.builds(
    LoaderMetrics,
    name=st.sampled_from(["train.py:1", "train.py:2"]),
    wait_s=seconds,
    step_s=seconds,
    batches=counts,
    samples=counts,
    fetch_ns=counts,
    settings=st.builds(lambda n: {"num_workers": n}, st.integers(0, 8)),
    faults=st.sampled_from([{}, {"samples": 3}]),
)
spent = st.builds(Totals, seconds, seconds, st.integers(1, 10**6), counts, seconds, counts, st.integers(0, 8))
rows = st.lists(
    st.one_of(
        st.just([*Numbers(), CODES["unknown"]]),
        st.tuples(*[st.floats(0, 100)] * 6, st.sampled_from(list(CODES.values()))).map(list),
    ),
    min_size=1,
    max_size=5,
)


@given(spent)
def test_parts_are_parts(total: Totals) -> None:
    found = numbers(total, 7)
    assert found.failed_samples == 7
    if total.loop_s:
        assert 0 <= found.wait_pct <= 100
        assert found.wait_s * total.batches == pytest.approx(total.wait_s)
        assert found.samples_per_s * total.loop_s == pytest.approx(total.samples)
    assert math.isnan(found.worker_busy_pct) or (total.workers and 0 <= found.worker_busy_pct <= 100)


@given(spent, spent)
def test_what_was_added_is_what_came_later(first: Totals, more: Totals) -> None:
    both = first.plus(more)
    since = both.since(first)
    assert since == pytest.approx(more._replace(workers=both.workers), rel=1e-6, abs=1e-6)
    assert first.since(None) == first
    assert between({"a": first}, {"a": first}) is None


@given(st.lists(loaders, max_size=2, unique_by=lambda m: m.name))
def test_the_loader_with_most_of_the_time_counts(each: list[LoaderMetrics]) -> None:
    now = totals(each)
    found = between({}, now)
    busy = [m for m in each if m.batches]
    assert (found is None) == (not busy)
    if found is not None and max(m.wait_s + m.step_s for m in busy) > 0:
        main = max(busy, key=lambda m: m.wait_s + m.step_s)
        assert found.wait_pct == pytest.approx(100 * main.wait_s / (main.wait_s + main.step_s))
        assert found.failed_samples == sum(m.faults.get("samples", 0) for m in each)


@given(rows)
def test_of_all_ranks_the_one_that_waits_the_longest_counts(each: list[list[float]]) -> None:
    found = combined(each)
    seen = {rank: row for rank, row in enumerate(each) if not math.isnan(row[0])}
    assert bool(found) == bool(seen)
    if not seen:
        return
    worst = max(seen, key=lambda rank: seen[rank][0])
    assert found["data/wait_pct"] == seen[worst][0]
    assert found.get("data/wait_rank", worst) == worst
    assert ("data/wait_rank" in found) == (len(each) > 1)
    assert CODES[str(found["data/verdict"])] == seen[worst][-1]
    assert found["data/samples_per_s"] == pytest.approx(sum(row[2] for row in seen.values()))
    assert found["data/wait_s"] == max(row[1] for row in seen.values())
