"""The report: wall clock, before and after, what is remembered of observed runs, and what is said of it."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stoker.core.files import cache_folder
from stoker.diagnosis.doctor import loader_stats
from stoker.diagnosis.doctor.verdict import diagnose
from stoker.diagnosis.report import applied as done
from stoker.diagnosis.report import history, text
from stoker.diagnosis.report.build import report_of
from stoker.diagnosis.report.merge import epoch_times
from stoker.diagnosis.report.schema import Applied, AppliedSettings, Change, LoaderReport, RememberedRun, RunReport
from stoker.diagnosis.watch import worker_record
from tests.commands.helpers import forked, forked_stoker, script
from tests.commands.helpers import report as written
from tests.diagnosis.helpers import entry, fields

ROWS = [
    [10, 4.0, 1.0, 0.1, 5.0, 80],
    [10, 0.1, 0.9, 0.1, 1.0, 80],
    [10, 0.1, 0.9, 0.1, 1.2, 80],
    [3, 0.1, 0.2, 0.1, 0.3, 24],
]
CACHE = {
    "kept": "PIL's decoding and Resize",
    "cut": "train.py:31",
    "why_not": "",
    "filled": 80,
    "samples": 80,
    "nbytes": 3 << 20,
    "fill_s": 0.4,
    "discarded": "",
}
SETTINGS = {
    "from": {"num_workers": 2, "staged": False},
    "to": {"num_workers": 2, "staged": True},
    "reason": "2 cores are granted",
    "measured_s": 0.5,
    "cache": CACHE,
}
NAME = "train.py:3"


def loader(**changes: Any) -> LoaderReport:
    found = entry(**{"by_epoch": ROWS, "epochs": 4, "loop_s": 7.5, **changes})
    found.epoch_s = epoch_times(found.by_epoch)
    return found


def run(applied: dict[str, Any] | None = None, *, before: RememberedRun | None = None, **changes: Any) -> RunReport:
    """A report of one loader."""
    one = loader(**changes)
    verdict, findings = diagnose([one], 2, False)
    out = RunReport(["train.py"], 0, 10.0, [one], verdict, findings)
    out.machine = {"cores": 2}
    if applied is not None:
        settings = msgspec.convert(applied, dict[str, AppliedSettings])
        out.applied = Applied(settings, done.compare(10.0, [one], settings, before, ""), before)
        out.findings = done.findings(out.applied) + findings
    return out


def full(applied: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """The same as JSON has it."""
    return run(applied, **changes).as_dict()


def typed(report: dict[str, Any]) -> RunReport:
    return msgspec.convert(report, RunReport)


def shown(report: dict[str, Any]) -> str:
    return " ".join(text.render(typed(report), None, io.StringIO(), details=True).split())


# ---------------------------------------------------------------------------------------------------------- wall clock


@pytest.mark.slow
def test_epochs_are_timed_from_their_begin_to_their_end(tmp_path: Path) -> None:
    path = script(tmp_path, nap=0.002, step=0.005, extra="if epoch and i >= 9: break").read_text()
    path = path.replace("for x, y in loader:", "for i, (x, y) in enumerate(loader):").replace("range(2)", "range(3)")
    (tmp_path / "train.py").write_text(path)
    p = forked_stoker(tmp_path, "--details", "train.py")
    assert p.returncode == 0, p.stderr
    r = written(tmp_path)
    (e,) = r["loaders"]
    assert [row[0] for row in e["by_epoch"]] == [20, 10, 10]
    assert [row[5] for row in e["by_epoch"]] == [80, 40, 40]
    for _, wait, step, _, seconds, _, first_step in e["by_epoch"]:
        assert 0 < first_step <= step
        assert seconds >= 0.99 * (wait + step)  # and what the watch itself takes
    assert e["loop_s"] == pytest.approx(sum(row[4] for row in e["by_epoch"]))
    assert e["samples_per_s"] == pytest.approx(160 / e["loop_s"])
    assert r["wall_s"] > e["loop_s"]
    assert e["epoch_s"]["each"] == [pytest.approx(e["by_epoch"][0][4], abs=1e-3)]  # the others were left
    assert "wall clock: the script took" in p.stderr


@pytest.mark.slow
def test_an_iterator_that_waits_to_be_asked_is_in_no_loop(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import time
        from torch.utils.data import DataLoader
        it = iter(DataLoader(list(range(8)), batch_size=2))
        time.sleep(1.5)
        print(len(list(it)))
        """,
    )
    assert forked_stoker(tmp_path, path).stdout == "4\n"
    assert written(tmp_path)["loaders"][0]["loop_s"] < 1.5


def test_measuring_is_inside_the_figures() -> None:
    spent = {NAME: {**SETTINGS, "measured_s": 2.0}}
    assert full(spent)["applied"]["compared"]["cost"] == {"trials_s": 2.0, "fill_s": 0.4}
    assert "what stoker itself cost is in these figures: 2.0 s before first batches and 400.0 ms" in shown(full(spent))


# ---------------------------------------------------------------------------------------------------- before and after


def test_without_an_observed_run_the_first_epoch_is_the_estimate() -> None:
    r = full({NAME: SETTINGS})
    compared = r["applied"]["compared"]
    assert compared["estimated"] is True
    (row,) = compared["loaders"]
    untouched = 5.0 - 0.5 - 0.4 / 2  # without the trials, and with two workers that stored samples
    assert row["later"] == {"before": pytest.approx(untouched), "after": pytest.approx(1.1)}
    assert row["first"] == {"before": pytest.approx(untouched), "after": 5.0}
    assert compared["script"]["before"] == pytest.approx(10.0 + 2 * untouched - 2.2 + untouched - 5.0)
    said = shown(r)
    assert "before (estimate)" in said
    assert "before is an estimate: no observed run of this command is known" in said


def test_an_estimate_leaves_the_warm_up_of_the_first_step_out() -> None:
    """On a GPU the first step loads and chooses kernels: 8 s of the first epoch in one script, of none after it."""
    first, *others = ROWS
    rows = [[*first, 0.6], *others]  # of 1.0 s in 9 steps
    (row,) = full({NAME: SETTINGS}, by_epoch=rows)["applied"]["compared"]["loaders"]
    assert row["each"]["before"] == pytest.approx([4.3, 4.3 - 0.55, 4.3 - 0.55])
    assert row["later"]["before"] == pytest.approx(4.3 - 0.55)


def test_an_estimate_may_show_that_it_got_slower() -> None:
    """Later epochs from the cache take 6 s, and the first one without stoker took 4.3 s."""
    first, *others = ROWS
    rows = [first, *([*row[:4], 6.0, *row[5:]] for row in others)]
    r = full({NAME: SETTINGS}, by_epoch=rows, loop_s=17.0, samples_per_s=47.0)
    compared = r["applied"]["compared"]
    (row,) = compared["loaders"]
    assert row["later"] == {"before": pytest.approx(4.3), "after": pytest.approx(6.0)}
    assert row["samples_per_s"]["before"] > row["samples_per_s"]["after"]
    assert compared["script"]["before"] < compared["script"]["after"]
    assert "0.72x" in shown(r)


def test_nothing_is_estimated_from_an_epoch_that_was_mostly_spent_on_trials() -> None:
    r = full({NAME: {**SETTINGS, "measured_s": 2.4}})  # of 5 s, and 0.2 s for storing
    assert r["applied"]["compared"]["script"] == {"before": None, "after": 10.0}
    assert "estimate" not in shown(r)


def test_nothing_is_estimated_where_nothing_was_kept() -> None:
    kept = {**SETTINGS, "to": {"num_workers": 4}, "cache": {"why_not": "its __getitem__ draws before it reads"}}
    r = full({NAME: kept})
    assert r["applied"]["compared"]["script"] == {"before": None, "after": 10.0}
    said = shown(r)
    assert "estimate" not in said
    assert "no observed run of this command is known" in said
    assert "nothing is cached: its __getitem__ draws before it reads" in said
    assert r["findings"][0]["cause"] == "too_few_workers"
    assert r["findings"][0]["change"] == {"num_workers": 4, "engine": "stoker"}


def test_keys_that_are_missing_are_no_error() -> None:
    for settings in (
        {},
        {"to": {}, "from": {}},
        {"to": {"staged": True}},
        {"cache": {"kept": "a"}, "to": {"staged": True}},
    ):
        assert "wall clock" in shown(full({NAME: settings}))


def test_what_was_applied_stands_first_and_its_first_epoch_is_nobodys_fault() -> None:
    slow = {"count": 40, "median_s": 0.001, "p95_s": 0.5, "slow_share": 0.9, "slow_count": 8, "slow_samples": {}}
    mixed = {"cache": CACHE, "tasks": slow, "waits": slow, "wait_s": 4.3, "step_s": 3.0, "batches": 33}
    stages = {**fields()["stages"], "fetch": {"self_s": 4.0}}
    r = full({NAME: SETTINGS}, **mixed, stages=stages)
    assert [(f["cause"], f["applied"]) for f in r["findings"]] == [("cacheable_prefix", True)]
    assert r["findings"][0]["measured_speedup"] == pytest.approx(4.3 / 1.1)
    assert r["verdict"] == "healthy"  # later epochs do not wait
    without = loader(**{**mixed, "cache": {}}, stages=stages)
    assert "stragglers" in [f.cause for f in diagnose([without], 2, False)[1]]
    said = shown(r)
    assert "after the first epoch, which filled the cache, the loop waits for data 0% of its time" in said
    assert (
        "cacheable_prefix, applied: stoker caches PIL's decoding and Resize, up to train.py:31: 80 of 80 samples"
        in said
    )
    of_calls = {**SETTINGS, "cache": {**CACHE, "calls": True, "filled": 95}}
    assert ": 95 results of calls, " in shown(full({NAME: of_calls}))


def test_later_epochs_are_those_after_the_cache_was_filled() -> None:
    e = loader(cache=CACHE, filled_epochs=2)
    assert loader_stats.filling_epochs(e) == 2
    later = loader_stats.later_epochs(e)  # these waited for their first batches only
    assert later.wait_s == pytest.approx(0.2 * e.batches / 13)
    assert later.stages.startup.wait_s == pytest.approx(later.wait_s)
    assert loader_stats.filling_epochs(loader(cache=CACHE, by_epoch=ROWS[:1])) == 0
    assert loader_stats.filling_epochs(loader()) == 0


@pytest.mark.slow
def test_a_stream_is_compared_too(tmp_path: Path) -> None:
    """Nothing is set for it, and stoker's engine is behind it all the same."""
    path = script(
        tmp_path,
        """
        from torch.utils.data import DataLoader, IterableDataset
        class Stream(IterableDataset):
            def __iter__(self): return iter(range(40))
        for epoch in range(2):
            print(len(list(DataLoader(Stream(), batch_size=4))))
        """,
    )
    assert forked_stoker(tmp_path, path).returncode == 0
    p = forked_stoker(tmp_path, "--apply", "--details", path)
    assert p.returncode == 0, p.stderr
    r = written(tmp_path)
    assert r["applied"]["settings"] == {}
    assert r["applied"]["compared"]["script"]["before"] > 0
    assert "try:" not in p.stderr
    assert "before / after" in p.stderr


# ------------------------------------------------------------------------------------------------------------ remembered


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_run_is_found_again_whatever_its_report_is_called(here: Path) -> None:
    path = script(here)
    assert forked_stoker(here, "--json", "a.json", path, "x").returncode == 0
    first = written(here, "a.json")
    history.save(msgspec.structs.replace(run(), command=[str(path), "y"]))
    assert forked_stoker(here, "--max-steps", "3", path, "x").returncode == 0  # cut short, and so not remembered
    assert forked_stoker(here, "--apply", "--json", "b.json", path, "x").returncode == 0
    compared = written(here, "b.json")["applied"]["compared"]
    assert compared["estimated"] is False
    assert compared["script"]["before"] == first["wall_s"]
    assert compared["notes"] == []
    path.write_text(path.read_text() + "# edited\n")
    assert "has been edited" in forked_stoker(here, "--apply", path, "x").stderr
    again = written(here)["applied"]["compared"]  # an applied run is not what one compares with
    assert again["script"]["before"] == first["wall_s"]


def test_nothing_of_a_run_can_be_read_from_its_name(here: Path) -> None:
    history.save(msgspec.structs.replace(run(), command=["train.py", "--token", "secret"]))
    (file,) = cache_folder("runs").iterdir()
    assert "secret" not in file.name + file.read_text()
    assert file.stat().st_mode & 0o77 == 0


def test_what_is_remembered_of_a_loader_is_what_it_was(here: Path) -> None:
    good = run(step_s=3.0)
    history.save(good)
    found = history.load(good.command)
    assert found is not None
    names = "name", "batches", "samples", "epochs", "wait_s", "step_s", "loop_s", "samples_per_s", "settings", "epoch_s"
    for name in names:
        assert getattr(found.loaders[0], name) == getattr(good.loaders[0], name), name


def test_a_run_that_failed_does_not_take_the_place_of_one_that_did_not(here: Path) -> None:
    good = run()
    history.save(good)
    history.save(msgspec.structs.replace(good, exit_code=1, wall_s=1.0))
    found = history.load(good.command)
    assert found is not None
    assert (found.complete, found.wall_s) == (True, 10.0)
    history.save(msgspec.structs.replace(good, command=["other.py"], partial=True))
    other = history.load(["other.py"])
    assert other is not None
    assert done.compare(1.0, good.loaders, {}, other, "").script == Change(None, 1.0)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"version": 1}',
        b'{"version": 1, "loaders": [{}]}',
        b"\xff",
        b"[" * 10**5,
        b'{"version": NaN}',
        b'{"version": 1e999}',
        b'{"version": ' + b"9" * 500 + b"}",
    ],
    ids=range(10),
)
def test_what_is_no_remembered_run_is_none(here: Path, content: bytes) -> None:
    history.save(run())
    (file,) = cache_folder("runs").iterdir()
    file.write_bytes(content)
    assert history.load(["train.py"]) is None
    history.save(run())
    assert history.load(["train.py"]) is not None


def test_where_nothing_can_be_written_nothing_is_remembered(here: Path) -> None:
    (here / "cache").write_text("a file")
    history.save(run())
    assert history.load(["train.py"]) is None


def test_runs_do_not_add_up_without_end(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_RUNS", 3)
    for i in range(6):
        history.save(msgspec.structs.replace(run(), command=[f"{i}.py"]))
        os.utime(history._path([f"{i}.py"]), (i, i))
    assert len(list(cache_folder("runs").iterdir())) == 3
    assert history.load(["5.py"]) is not None
    monkeypatch.setattr(history, "MAX_BYTES", 10)
    history.save(msgspec.structs.replace(run(), command=["long.py"]))
    assert history.load(["long.py"]) is None


# -------------------------------------------------------------------------------------------------------------- the text


def test_bars_fit_and_have_one_scale() -> None:
    class Plain(io.StringIO):
        encoding = "ascii"

    lines = done.bars([8.0, 8.0], [8.0, 1.0, 1.0], 60, False, Plain())
    assert all(len(line) <= 60 for line in lines)
    drawn = [line.count("#") for line in lines]
    assert drawn == [32, 32, 32, 4, 4]
    assert lines[1].startswith(" " * 9 + "after")
    assert len(done.bars([1.0] * 40, [1.0] * 40, 60, False, Plain())) == 2 * done.EPOCHS
    assert done.bars([], [], 60, False, Plain()) == []


def test_what_could_not_be_reached_is_said_by_name() -> None:
    missed = {"name": "train.py:9", "class": "torchdata StatefulDataLoader", "reason": "it has its own iterators"}
    snapshot = {"pid": 1, "final": True, "loaders": [], "applied": {}, "bypassing": [missed, missed]}
    r = report_of(["train.py"], 0, [snapshot], {"gpu_busy": []}, 1.0).as_dict()
    assert [b["name"] for b in r["bypassing"]] == ["train.py:9"]
    said = shown(r)
    assert "train.py:9: stoker's engine does not reach this loader" in said
    assert "it has its own iterators" in said
    assert "no DataLoader was iterated" not in said


@pytest.mark.parametrize(("startup", "fine"), [(0.01, True), (0.9, False)])
def test_a_loader_whose_start_takes_half_of_the_loop_is_not_called_fine(startup: float, fine: bool) -> None:
    r = full(stages={**fields()["stages"], "startup": {"wait_s": startup}}, wait_s=startup + 0.01, epochs=1)
    assert r["verdict"] == "healthy"
    assert ("your loader is fine" in shown(r)) == fine
    assert ("the first batch takes 47% of the loop's time" in shown(r)) != fine


def test_apply_is_advised_where_it_does_something() -> None:
    starved: dict[str, Any] = {"wait_s": 4.0, "settings": {"num_workers": 0}, "by_epoch": [], "epochs": 1}
    for iterable in (False, True):
        r = full(**{**starved, "settings": {**fields()["settings"], "num_workers": 0, "iterable": iterable}})
        assert r["findings"][0]["cause"] == "main_process_loading"
        stream = io.StringIO()
        stream.write(text.render(typed(r), Path("a.json"), stream))
        assert ("try: stoker run --apply" in stream.getvalue()) != iterable


def test_the_last_line_says_what_explains_the_first_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it has room for that."""
    r = typed(full(wait_s=4.0, settings={"num_workers": 0}, by_epoch=[], epochs=1))
    for columns, last in (("80", "report: a.json; see stoker explain main_process_loading"), ("40", "report: a.json")):
        monkeypatch.setenv("COLUMNS", columns)
        assert text.render(r, Path("a.json"), io.StringIO()).splitlines()[-1] == last


def test_a_loop_that_takes_all_cores_is_told_so() -> None:
    stages = {**fields()["stages"], "worker": {"cpu_s": 3.7, "tasks": 100}, "fetch": {"self_s": 3.9}}
    busy = {
        "wait_s": 1.0,
        "step_s": 1.0,
        "stages": stages,
        "kernel": {"cpu_ns": 3_700_000_000},
        "by_epoch": [],
        "epochs": 1,
    }
    assert [f["cause"] for f in full(**busy)["findings"]] == ["too_few_cores"]
    idle = {**busy, "stages": {**stages, "worker": {"cpu_s": 0.7, "tasks": 100}}, "kernel": {"cpu_ns": 700_000_000}}
    assert full(**idle)["findings"] == []


def test_the_looks_do_not_count_as_a_datasets_threads() -> None:
    """On a busy machine they took more CPU than tasks that sleep, which was blamed on native threads."""
    sleeps = {
        "wait_s": 9.0,
        "stages": {**fields()["stages"], "worker": {"cpu_s": 0.3, "tasks": 100}, "fetch": {"self_s": 17.0}},
        "kernel": {"cpu_ns": 5_000_000_000, "delay_ns": 4_000_000_000, "seconds": 18.0},
        "settings": {"num_workers": 2},
        "epochs": 1,
    }
    assert "thread_oversubscription" not in [f["cause"] for f in full(**sleeps, by_epoch=[])["findings"]]
    fights = {**sleeps, "stages": {**sleeps["stages"], "worker": {"cpu_s": 6.0, "tasks": 100}}}  # type: ignore[dict-item]
    fights["kernel"] = {"cpu_ns": 14_000_000_000, "delay_ns": 8_000_000_000, "seconds": 18.0}
    assert "thread_oversubscription" in [f["cause"] for f in full(**fights, by_epoch=[])["findings"]]


def test_a_loader_that_is_watched_in_a_process_counts_its_own_looks(tmp_path: Path) -> None:
    def watched() -> None:
        record = worker_record.WorkerRecord(memoryview(bytearray(worker_record.ROW_BYTES)), None, None)
        record.sampler.cpu_s = 1e6
        record.write()
        print(json.dumps(worker_record.read(record._row)["kernel"]["cpu_ns"]))

    assert json.loads(forked(watched, tmp_path).stdout) < 0


def test_names_do_not_steer_the_terminal_and_a_command_can_be_copied() -> None:
    r = typed(full(wait_s=4.0, settings={"num_workers": 0}, by_epoch=[], epochs=1))
    r.command = ["e$(id);.py", "--name", "a b", "\x1b]0;title\x07"]
    r.loaders[0].name = "/home/me/\x1b[2J\ntrain.py:3"
    r.diff = "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-\tx = 1\x1b[31m\n+\tx = 2\n"
    out = text.render(r, Path("a\x1b[1m.json"), io.StringIO())
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "-\tx = 1?[31m\n+\tx = 2\n" in out
    assert "stoker run --apply 'e$(id);.py' --name 'a b' '?]0;title?'\n" in out
    assert "train.py:3" in out
