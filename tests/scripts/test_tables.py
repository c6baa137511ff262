"""Changes in tables of pandas. It is not among the fast tests, for pandas is no dependency of theirs."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.scripts
pandas = pytest.importorskip("pandas")

import numpy as np  # noqa: E402

from stoker.core.fingerprint import Fingerprint  # noqa: E402
from stoker.core.handles import held  # noqa: E402
from stoker.core.object_tree import walk  # noqa: E402


class Rows:
    def __init__(self, n: int) -> None:
        dates = pandas.date_range("2019-01-01", periods=n, freq="h")
        self.frame = pandas.DataFrame({"file": [f"{i}.png" for i in range(n)], "label": np.arange(n) % 7}, index=dates)
        self.frame["rating"] = [None if i % 3 else float(i) for i in range(n)]
        self.weights = pandas.Series(np.ones(n))
        self.names = pandas.Index(["cat", "dog"])


def relabel(x: Rows) -> None:
    x.frame.loc[x.frame["label"] > 3, "label"] = 0


def set_one_cell(x: Rows) -> None:
    x.frame.iloc[5, 1] = 70


def rename_a_file(x: Rows) -> None:
    x.frame.iloc[5, 0] = "other.png"


def scale_a_column(x: Rows) -> None:
    x.frame["rating"] *= 2


def add_a_column(x: Rows) -> None:
    x.frame["more"] = 1


def turn_round(x: Rows) -> None:
    x.frame = x.frame[::-1]


def move_the_index(x: Rows) -> None:
    x.frame.index = x.frame.index + pandas.Timedelta(1, "h")


def weigh(x: Rows) -> None:
    x.weights[3] = 2


def another_name(x: Rows) -> None:
    x.names = pandas.Index(["cat", "bird"])


CHANGES = [
    relabel,
    set_one_cell,
    rename_a_file,
    scale_a_column,
    add_a_column,
    turn_round,
    move_the_index,
    weigh,
    another_name,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_table_is_seen(change: object) -> None:
    rows = Rows(300)
    before = Fingerprint(rows)
    change(rows)  # type: ignore[operator]
    assert before.changed(rows)


@pytest.mark.parametrize("change", [relabel, scale_a_column, add_a_column, turn_round, move_the_index])
def test_a_change_of_most_rows_of_a_large_table_is_seen(change: object) -> None:
    rows = Rows(50_000)
    before = Fingerprint(rows)
    change(rows)  # type: ignore[operator]
    assert before.changed(rows)


def test_reading_or_copying_a_table_is_no_change() -> None:
    rows = Rows(300)
    before = Fingerprint(rows)
    rows.frame.loc[rows.frame.index[3]], rows.frame.iloc[5:9], rows.frame["label"].median(), rows.weights.get(4)
    rows.frame = rows.frame.copy()
    assert not before.changed(rows)


def test_nothing_is_looked_for_inside_a_table() -> None:
    rows = Rows(300)
    assert not held(rows)
    paths = {path for path, _ in walk(rows)}
    assert paths == {"dataset", "dataset.frame", "dataset.weights", "dataset.names"}
