"""README.md and benchmarks/README.md: what they show of results is what the stored results say."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import demo, pages, reports, versions, versions_table
from docs.generate import reference
from stoker.commands.main import COMMANDS
from tests.commands.helpers import forked

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
ANEW = "python -m benchmarks.pages writes it anew"


def test_the_readme_is_short_and_begins_with_a_picture() -> None:
    assert len(README.split()) <= 700
    assert len(README[: README.index("<details>")].split()) <= 500
    assert README.index("docs/demo-light.svg") < 700  # on the first screen


@pytest.mark.parametrize("shade", ["light", "dark"])
def test_the_terminal_shows_the_stored_run(shade: str) -> None:
    kept = json.loads(demo.KEPT.read_text())
    drawn = (ROOT / "docs" / f"demo-{shade}.svg").read_text()
    assert drawn == demo.picture(kept, shade == "dark"), ANEW
    assert f"docs/demo-{shade}.svg" in README
    assert "http" not in re.sub(r'xmlns="[^"]*"|<!--.*?-->', "", drawn)  # nothing is fetched
    assert kept["report"]["command"] == [demo.SCRIPT]
    script = kept["report"]["applied"]["compared"]["script"]
    assert f"took {script['before']:.1f} s before and {script['after']:.1f} s after" in README


@pytest.mark.parametrize("shade", ["light", "dark"])
def test_the_picture_of_gains_shows_the_stored_runs(shade: str) -> None:
    drawn = (ROOT / "docs" / f"gains-{shade}.svg").read_text()
    assert f"docs/gains-{shade}.svg" in README
    for scripts in pages.gains().values():
        for plain, applied, ratio in scripts.values():
            assert f">{plain:.1f} s<" in drawn, ANEW
            assert f">{applied:.1f} s, {ratio:.1f}x<" in drawn, ANEW
        ratios = [ratio for _, _, ratio in scripts.values()]
        assert f"{min(ratios):.1f} to {max(ratios):.1f} times less" in README


def test_the_versions_are_those_of_the_stored_results() -> None:
    shown = versions_table.table(versions_table.read(versions.KEPT))
    assert f"-->\n{shown}\n<!-- end -->" in (ROOT / "docs" / "versions.md").read_text(), ANEW


def in_a_fork(line: list[str], cwd: Path, **_: Any) -> subprocess.CompletedProcess[str]:
    """In the place of subprocess.run: ``python -m MODULE`` in a fork of this process."""
    assert line[1] == "-m"

    def does() -> None:
        sys.argv = line[2:]
        runpy.run_module(line[2], run_name="__main__", alter_sys=True)

    done = forked(does, cwd)
    done.check_returncode()
    return done


@pytest.mark.slow
def test_tables_are_what_their_commands_print(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages.subprocess, "run", in_a_fork)
    for page in pages.PAGES:
        assert page.read_text() == pages.filled(page.read_text()), ANEW


@pytest.mark.slow
def test_the_picture_of_gains_is_drawn_the_same_each_time() -> None:
    pytest.importorskip("matplotlib")
    assert pages.gains_picture(True) == pages.gains_picture(True)


def test_results_are_of_no_machine_of_ours() -> None:
    for path in (*pages.PAGES, demo.KEPT, *(ROOT / "docs").glob("*.svg"), *reports.OUT.iterdir()):
        text = path.read_text()
        assert str(ROOT) not in text
        assert "site-packages" not in text


def test_the_example_reports_are_those_that_are_listed() -> None:
    again = "python -m benchmarks.reports makes them anew"
    assert (reports.OUT / "README.md").read_text() == reports.index(), again
    assert (reports.OUT / "train_lazy.html").read_text() == reports.stored(), again
    assert {path.stem for path in reports.OUT.glob("*.html")} == {*reports.EXAMPLES, "train_lazy"}
    assert sum(path.stat().st_size for path in reports.OUT.iterdir()) < 200 << 10
    truth = json.loads((ROOT / "tests" / "diagnosis" / "truth.json").read_text())
    for name in reports.EXAMPLES:
        page = (reports.OUT / f"{name}.html").read_text()
        for cause in truth[name]:
            assert f"<h3>{cause}\n" in page
        assert ("healthy</b>" in page) == (not truth[name])


@pytest.mark.slow
def test_links_lead_somewhere() -> None:
    made = {ROOT / "docs" / name for name in reference.pages()}  # when the site is built
    pages_there = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "benchmarks").glob("*.md"),
    ]
    for page in pages_there:
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)|(?:src|srcset)=\"([^\"]+)\"", page.read_text()):
            target = next(filter(None, link))
            path = (page.parent / target).resolve()
            there = target.startswith("https://") or path.exists() or path in made
            assert there, f"{page.name}: {target}"


def test_commands_are_there() -> None:
    assert set(re.findall(r"(?m)(?:^ {4}|`)stoker ([a-z][a-z-]*)", README)) <= set(COMMANDS)
