"""What a failing run ends with: five lines for each failure, and where the whole of it lies.

::

    FAILED tests/core/test_files.py::test_names
      run again:  make test ARGS="-m '' 'tests/core/test_files.py::test_names'"
      seed:       STOKER_SEED is not set
      expected:   ['a', 'b']
      got:        ['a']
      log:        .pytest_cache/failures/tests.core.test_files.py..test_names.txt
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

LONGEST = 160  # characters of a value
_compared: list[tuple[str, object, object]] = []  # by the last assertion that failed


def pytest_assertrepr_compare(op: str, left: object, right: object) -> None:
    _compared[:] = [(op, left, right)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        path = Path(
            item.config.rootpath, ".pytest_cache", "failures", re.sub(r"[^\w.-]+", ".", item.nodeid)[:200] + ".txt"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        parts = [f"{report.when}\n{report.longreprtext}", *(f"-- {title}\n{text}" for title, text in report.sections)]
        path.write_text("\n\n".join(parts), errors="backslashreplace")
        expected, got = _expected_and_got(call.excinfo)
        report.user_properties.append(("failure", (expected, got, str(path.relative_to(item.config.rootpath)))))
    _compared.clear()
    return report


def _expected_and_got(error: pytest.ExceptionInfo[BaseException] | None) -> tuple[str, str]:
    if error is None:
        return "", ""
    if isinstance(error.value, AssertionError) and _compared:
        op, left, right = _compared[-1]
        return f"{'' if op == '==' else op + ' '}{right!r}"[:LONGEST], f"{left!r}"[:LONGEST]
    lines = str(error.value).splitlines() or [""]
    if isinstance(error.value, AssertionError):
        line = str(error.traceback[-1].statement).strip().splitlines()[0]
        return line[:LONGEST], lines[0][:LONGEST]
    return "no exception", f"{type(error.value).__name__}: {lines[0]}"[:LONGEST]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    seed = os.environ.get("STOKER_SEED")
    failed = [report for key in ("failed", "error") for report in terminalreporter.stats.get(key, [])]
    if failed:
        terminalreporter.section("summary of failures")
    for report in failed:
        expected, got, log = dict(getattr(report, "user_properties", ())).get(
            "failure", ("the test ends", report.longreprtext, "")
        )
        again = f"{'' if seed is None else f'STOKER_SEED={seed} '}make test ARGS=\"-m '' '{report.nodeid}'\""
        terminalreporter.write_line(f"FAILED {report.nodeid}", red=True)
        terminalreporter.write_line(f"  run again:  {again}")
        terminalreporter.write_line(f"  seed:       {'STOKER_SEED is not set' if seed is None else seed}")
        terminalreporter.write_line(f"  expected:   {_one_line(expected)}")
        terminalreporter.write_line(f"  got:        {_one_line(got)}")
        terminalreporter.write_line(f"  log:        {log}")


def _one_line(text: str) -> str:
    return " ".join(text.split())[:LONGEST]
