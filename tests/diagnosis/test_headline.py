"""The report's first sentence: what a run gained, whether that is an estimate, and what stands before a gain."""

from __future__ import annotations

import io
import json
from typing import Any

import msgspec
import pytest

from stoker.diagnosis.report import applied as done
from stoker.diagnosis.report import html, inline, text
from stoker.diagnosis.report.headline import headline
from stoker.diagnosis.report.schema import (
    Applied,
    AppliedSettings,
    Bypassing,
    Cache,
    Change,
    ChangedSettings,
    Compared,
    LoaderChange,
    RunReport,
)
from tests.diagnosis.test_report import loader, run

NAME = "train.py:3"


def applied(before: float | None, after: float, estimated: bool = False, later: float = 1.0, **cache: Any) -> RunReport:
    report = run()
    settings = AppliedSettings(after=ChangedSettings(staged=not cache.get("why_not")), cache=Cache(**cache))
    rows = [LoaderChange(NAME, later=Change(later, 1.0))]
    compared = Compared(estimated, Change(before, after), rows)
    report.applied = Applied({NAME: settings}, compared)
    return report


@pytest.mark.parametrize(
    ("report", "sentence"),
    [
        (
            applied(41.3, 11.4, compared=53),
            "3.6 times as fast: train.py took 41.3 s and now takes 11.4 s; 53 cached samples were made again, and all "
            "were the same",
        ),
        (applied(41.3, 11.4, estimated=True), "about 3.6 times as fast: train.py took about 41.3 s and now takes 11.4 s"),
        (applied(11.4, 11.3), "no gain: train.py took 11.4 s and now takes 11.3 s"),
        (
            applied(10.0, 12.0, why_not="it draws before it reads"),
            "slower: train.py took 10.0 s and now takes 12.0 s; nothing is cached: it draws before it reads",
        ),
        (
            applied(10.0, 10.0, later=5.0),
            "later epochs of train.py:3 5.0 times as fast, the whole not yet: train.py took 10.0 s and now takes 10.0 s",
        ),
        (applied(None, 10.0, estimated=True), "train.py took 10.0 s; no run without --apply is known to compare with"),
        (
            applied(41.3, 11.4, stale=True, discarded="sample 3 is another"),
            "some samples may have been wrong: sample 3 is another. Nothing was served from the cache after that",
        ),
        (run(wait_s=4.0, by_epoch=[], epochs=1), "input-bound: the loop waits for data 80% of its time"),
        (
            RunReport(["nope.py"], 2, 1.0, [], "unknown"),
            "the command failed before it iterated a DataLoader; its own error is above",
        ),
        (RunReport(["train.py"], 0, 1.0, [], "unknown"), "no DataLoader was iterated in this run; run code that iterates one, for an epoch or some seconds"),
    ],
)  # fmt: skip
def test_the_first_sentence(report: RunReport, sentence: str) -> None:
    assert headline(report) == sentence


def test_a_run_that_ended_early_is_not_compared() -> None:
    one = loader()
    settings = {NAME: AppliedSettings(after=ChangedSettings(staged=True), cache=Cache(filled=8))}
    report = run()
    for ended in (True, False):
        report.applied = Applied(settings, done.compare(4.1, [one], settings, None, "", ended))
        assert ("times as fast" in headline(report)) == ended
    assert headline(report) == "train.py took 10.0 s; this run ended early, so it has no total to compare"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["-m", "package.train", "--lr", "1"], "package.train"),
        (["torchrun", "--nproc-per-node", "2", "a/train.py"], "train.py"),
    ],
)
def test_a_command_is_called_what_the_user_calls_it(command: list[str], name: str) -> None:
    report = applied(41.3, 11.4)
    report.command = command
    assert f": {name} took 41.3 s" in headline(report)


def test_loaders_of_one_cache_count_its_comparisons_once() -> None:
    report = applied(41.3, 11.4, compared=53, filled=8)
    assert report.applied is not None
    report.applied.settings["train.py:9"] = report.applied.settings[NAME]
    assert "; 53 cached samples" in headline(report)


def test_a_loader_without_a_cache_is_named_if_another_has_one() -> None:
    report = applied(11.4, 11.3, filled=8)
    assert report.applied is not None
    report.applied.settings["train.py:9"] = AppliedSettings(cache=Cache(why_not="it draws before it reads"))
    assert headline(report).endswith("; nothing is cached for train.py:9: it draws before it reads")


def test_every_loader_out_of_reach_is_named() -> None:
    report = run()
    report.loaders, report.bypassing = [], [Bypassing(f"train.py:{k}", reason="its own") for k in (9, 12)]
    shown = text.render(report, None, io.StringIO(), 80)
    assert [shown.count(f"train.py:{k}:") for k in (9, 12)] == [1, 1]


def test_a_loader_out_of_reach_is_the_answer_if_there_is_no_other() -> None:
    report = run()
    report.loaders, report.bypassing = [], [Bypassing("train.py:9", reason="it has its own iterators")]
    assert headline(report).startswith("train.py:9: stoker's engine does not reach this loader")


@pytest.mark.parametrize("columns", [40, 80])
def test_the_answer_is_in_the_first_line_whatever_renders_it(columns: int) -> None:
    report = applied(41.3, 11.4)
    shown = text.render(report, None, io.StringIO(), columns)
    assert shown.splitlines()[1].startswith("stoker: 3.6 times as fast")
    assert max(map(len, shown.splitlines())) <= columns
    page = html.render(report)
    assert page.index("3.6 times as fast") < page.index('class="tiles"')
    assert "healthy" in inline.render(run())


def test_a_healthy_run_is_one_line() -> None:
    report = run(wait_s=0.001, by_epoch=[], epochs=1)
    assert report.verdict == "healthy"
    shown = text.render(msgspec.structs.replace(report, findings=[]), None, io.StringIO(), 80)
    assert [line for line in shown.splitlines() if line] == [
        "stoker: healthy: your loader is fine, the loop waits for data 0% of its time"
    ]


def test_details_have_every_count() -> None:
    report = applied(41.3, 11.4)
    assert "wall clock" not in text.render(report, None, io.StringIO(), 80)
    shown = text.render(report, None, io.StringIO(), 80, details=True)
    assert all(words in shown for words in ("wall clock: the script took", "before / after", "samples/s"))
    json.dumps(report.as_dict())
