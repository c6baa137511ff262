"""The simulation of ``benchmarks.scale``: what it has to conserve, and rates that follow from arithmetic alone."""

from __future__ import annotations

import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scale import compare, model, picture
from benchmarks.scale.model import Costs, Node, Plan, Simulation
from tests.commands.helpers import forked

ROOT = Path(__file__).parent.parent
COSTS = Costs(400e-6, 50e-6, 3e-10, 1e-3, 8e-10, 100e-6)


FREE = Costs()


def rate(plan: Plan, costs: Costs = FREE, skip: int = 50) -> float:
    return Simulation(plan, costs).run().rate(skip)


@pytest.mark.few(9)
@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize(
    "fault",
    [
        None,
        Node(4, slow=20.0),
        Node(4, dies=0.3),
        Node(4, dies=0.3, notice=2.0),
        Node(4, slow=1000.0, slow_from=0.3),
        Node(4, slow=50.0, dies=0.3),
    ],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_each_task_is_delivered_once_and_in_order(fault: Node | None, gather: bool, seed: int) -> None:
    nodes = (Node(4), Node(4), Node(8, slow=1.5))
    plan = Plan(300, 0.02, 4096, nodes, 2, ranks=3, step_s=0.001, spread=0.5, fault=fault, gather=gather)
    outcome = Simulation(plan, COSTS, seed).run()
    assert outcome.delivered == [list(range(300))] * 3
    assert outcome.times == sorted(outcome.times)
    assert len(outcome.waits) == 300
    assert min(outcome.waits) >= 0
    if fault is None:
        assert outcome.made >= 900
    else:
        assert outcome.made > 900  # what the node had is made again


def test_the_same_seed_gives_the_same_run() -> None:
    plan = Plan(200, 0.02, 1 << 20, (Node(4),), 1, ranks=2, spread=1.0)
    first, again, other = (Simulation(plan, COSTS, seed).run() for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_one_core_makes_one_batch_after_another() -> None:
    assert rate(Plan(200, 0.25, local=1)) == pytest.approx(4)
    assert rate(Plan(200, 0.25, nodes=(Node(1),))) == pytest.approx(4)
    assert rate(Plan(200, 0.25, nodes=(Node(1, slow=3.0),))) == pytest.approx(4 / 3)


def test_cores_and_nodes_add_up() -> None:
    assert rate(Plan(4000, 0.25, local=3, nodes=(Node(8), Node(5))), skip=400) == pytest.approx(64, rel=0.01)
    # half as fast, and still used to its capacity, for two tasks ahead hide an answer's way
    assert rate(Plan(4000, 0.25, nodes=(Node(8), Node(8, slow=2.0))), skip=400) == pytest.approx(48, rel=0.05)


@pytest.mark.few(7)
@pytest.mark.parametrize("core_s", [0.001, 0.01, 0.03])
@pytest.mark.parametrize("wire_s", [0.001, 0.01, 0.03])
@pytest.mark.parametrize("driver_s", [0.001, 0.01, 0.03])
def test_of_stations_in_a_row_the_slowest_counts(core_s: float, wire_s: float, driver_s: float) -> None:
    nbytes = 1 << 20
    costs = Costs(batch_s=driver_s / 2, copy_s=driver_s / 2 / nbytes, wire_s=wire_s / nbytes)
    plan = Plan(1000, core_s, nbytes, (Node(2), Node(2)))
    slowest = max(core_s / 4, wire_s, driver_s)
    found = rate(plan, costs, skip=100)
    assert found == pytest.approx(1 / slowest, rel=0.02)


def test_a_way_that_is_longer_than_what_is_ahead_is_waited_for() -> None:
    """Little's law: two tasks in flight, each there for the time it is made and two ways."""
    assert rate(Plan(400, 0.03, nodes=(Node(1),)), Costs(latency_s=0.035)) == pytest.approx(2 / 0.1, rel=0.02)


def test_a_step_that_takes_longer_hides_everything() -> None:
    plan = Plan(200, 0.01, nodes=(Node(4),), step_s=0.1, ranks=4)
    outcome = Simulation(plan, Costs(latency_s=0.001)).run()
    assert outcome.rate(10) == pytest.approx(10)
    assert max(outcome.waits[1:]) == pytest.approx(0)


def test_ranks_wait_for_the_slowest_of_them() -> None:
    nodes = (Node(1, slow=2.0),)
    plan = Plan(200, 0.01, nodes=(Node(1),), ranks=3)
    assert rate(plan) == pytest.approx(100)
    assert rate(replace(plan, fault=nodes[0])) == pytest.approx(50)


def test_a_dead_node_costs_its_share() -> None:
    plan = Plan(2000, 0.01, nodes=(Node(4), Node(4)), local=2)
    outcome = Simulation(replace(plan, fault=Node(4, dies=0.5)), Costs()).run()
    before = sum(t < 0.5 for t in outcome.times)
    assert before / 0.5 == pytest.approx(1000, rel=0.05)
    after = [t for t in outcome.times if t > 0.7]
    assert (len(after) - 1) / (after[-1] - after[0]) == pytest.approx(600, rel=0.05)


def test_without_a_worker_it_ends() -> None:
    with pytest.raises(RuntimeError, match="no worker is left"):
        Simulation(Plan(10, 1.0), Costs()).run()
    with pytest.raises(RuntimeError, match="no worker is left"):
        Simulation(Plan(100, 1.0, nodes=(Node(1, dies=5.0),)), Costs()).run()


def test_calls_are_packed_if_tasks_are_gathered() -> None:
    plan = Plan(1000, 1e-5, 4096, (Node(16), Node(16)))
    alone, gathered = (Simulation(replace(plan, gather=g), COSTS).run() for g in (False, True))
    assert gathered.calls < alone.calls / 3
    assert gathered.rate(100) > 2 * alone.rate(100)


def test_its_rules_are_the_pool_s() -> None:
    nodes = pytest.importorskip("stoker_ray.nodes")
    pool = pytest.importorskip("stoker_ray.pool")
    assert nodes.AHEAD == model.AHEAD
    for name in ("TICK_S", "LATE", "HANGS_S", "PACK_BYTES", "MOST_PACKED", "PACK_S", "STORE_SHARE"):
        assert getattr(pool, name) == getattr(model, name), name


def test_a_slow_node_that_is_dropped_costs_little() -> None:
    plan = Plan(1000, 0.05, nodes=(Node(4), Node(4)), local=2, fault=Node(4, slow=10.0))
    kept, dropped = (rate(replace(plan, drop_slow=drop), skip=200) for drop in (False, True))
    assert kept < 100  # a tenth of what all cores could make is soon waited for
    assert dropped > 0.9 * 6 / 0.05


# -- fitted to what was measured


def test_costs_are_found_again() -> None:
    """Lines as a machine with these costs would give them, and others that a busy one gives."""
    lines = [
        {"packed": 1, "call_s": 400e-6, "processor_s": 250e-6},
        {"packed": 8, "call_s": 470e-6},
        {"packed": 0, "way_s": 600e-6},
        {"batch_s": 40e-6},
        *({"size": s, "object_s": 2e-3 + n * 1e-9} for s, n in (("1 MB", 1 << 20), ("64 MB", 64 << 20))),
        {"size": "8 MB", "copy_s": (8 << 20) * 1e-10},
    ]
    busy = [{k: v * 3 if isinstance(v, float) else v for k, v in line.items()} for line in lines]
    found = compare.fitted(lines + busy)
    assert found.call_s == 400e-6
    assert found.batch_s == pytest.approx(50e-6)
    assert found.copy_s == pytest.approx(1e-10)
    assert found.object_s == pytest.approx(2e-3)
    assert found.wire_s == pytest.approx(1e-9)
    assert found.latency_s == pytest.approx(100e-6)
    assert compare.network(lines).call_s == 250e-6


def test_it_says_what_was_measured() -> None:
    lines = compare.read(picture.KEPT)
    again = list(compare.compared(lines))
    stored = [{k: v for k, v in line.items() if k != "simulated"} for line in compare.of(lines, "compared")]
    assert again == stored, "python -m benchmarks.scale simulate FILE"
    close = [x["run"] for x in again if abs(x["model"] / x["measured"] - 1) <= 0.2]
    assert len(close) >= 3
    assert {"sleep 4", "slow 10"} <= set(close)


def test_the_page_shows_the_stored_lines() -> None:
    page = (ROOT / "docs" / "scale.md").read_text()
    lines = compare.read(picture.KEPT)
    shown = re.findall(
        r"<!-- \$ python -m benchmarks.scale table (\S+) (\S+) -->\n(.*?)\n<!-- end -->", page, re.DOTALL
    )
    assert {name for _, name, _ in shown} == set(compare.TABLES)
    for path, name, table in shown:
        assert ROOT / path == picture.KEPT
        assert table == compare.TABLES[name](lines), "python -m benchmarks.pages writes it anew"
    assert len(page.splitlines()) <= 150


@pytest.mark.slow
def test_wrong_usage() -> None:
    for args in ((), ("table", "none.jsonl"), ("table", str(Path(__file__))), ("one", "nothing")):

        def does(args: tuple[str, ...] = args) -> None:
            sys.argv = ["scale", *args]
            runpy.run_module("benchmarks.scale", run_name="__main__")

        assert forked(does, ROOT).returncode == 2, args


@pytest.mark.slow
def test_the_picture_is_drawn_the_same_each_time() -> None:
    pytest.importorskip("matplotlib")
    assert picture.picture(picture.KEPT, True) == picture.picture(picture.KEPT, True)
