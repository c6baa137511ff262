"""``stoker compare``: real reports against each other, and files that are none. Whatever a file holds: no traceback."""

from __future__ import annotations

import copy
import json
import os
import pty
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.commands import main as cli
from stoker.commands.arguments import loss
from stoker.core.errors import UsageError
from stoker.diagnosis.report.compare import NAME, Pair, compare, load, parse
from tests.commands.helpers import forked_stoker

TRAIN = """
    import sys, threading, torch
    from torch.utils.data import DataLoader, Dataset

    class Data(Dataset):
        def __len__(self): return 60
        def __getitem__(self, i):
            threading.Event().wait(0.002)
            return torch.full((4,), float(i)), i

    if __name__ == "__main__":
        for batch in DataLoader(Data(), batch_size=4, num_workers=int(sys.argv[1])):
            threading.Event().wait(0.001)
"""


def run_report(folder: Path, name: str, *args: str, text: str = TRAIN) -> dict[str, Any]:
    (folder / "train.py").write_text(textwrap.dedent(text))
    forked_stoker(folder, "--json", name, "train.py", *args).check_returncode()
    return json.loads((folder / name).read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two reports of one script, before and after it was edited: workers, and a line more above the loader."""
    folder = tmp_path_factory.mktemp("real")
    before = run_report(folder, "a.json", "0")
    after = run_report(folder, "b.json", "2", text="    # a line more\n" + TRAIN)
    return before, after


def report(**changes: Any) -> dict[str, Any]:
    """A report by hand: 100 samples a second, a tenth of it waiting."""
    entry = {"name": "t.py:3", "batches": 10, "samples": 1000, "epochs": 1, "wait_s": 1.0, "step_s": 9.0}
    entry |= {"samples_per_s": 100.0, "settings": {}, "stages": {}, "memory": {}}
    entry |= {key: changes.pop(key) for key in list(changes) if key in entry}
    head = {"schema": 2, "command": ["t.py"], "exit_code": 0, "wall_s": 10.0, "verdict": "healthy"}
    return {**head, "loaders": [entry], "partial": False, **changes}


def compared(a: dict[str, Any], b: dict[str, Any], fail_above: float | None = None) -> Any:
    return compare(*(parse(json.dumps(r).encode(), f"{n}.json") for n, r in (("a", a), ("b", b))), fail_above)


def command(folder: Path, a: Any, b: Any, *args: str) -> int:
    for name, data in (("a.json", a), ("b.json", b)):
        (folder / name).write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
    return cli.main(["compare", str(folder / "a.json"), str(folder / "b.json"), *args])


def test_a_report_of_schema_1_is_compared() -> None:
    old = report(schema=1)
    del old["wall_s"]
    old["loaders"][0] |= {"device": None, "cacheable": {}, "helpers": []}
    (pair,) = compared(old, report()).pairs
    assert pair.ratio["samples_per_s"] == 1.0


@pytest.mark.slow
def test_two_runs_of_a_script(
    real: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    a, b = real
    assert command(tmp_path, a, b) == 0
    said = capfd.readouterr()
    assert said.err == ""
    assert max(map(len, said.out.splitlines())) <= 80
    assert "\033" not in said.out
    assert "num_workers 0 -> 2" in said.out
    assert "train.py:13 of B is compared with train.py:12 of A" in " ".join(said.out.split())
    assert "gone: main_process_loading" in said.out
    assert "not the same command: train.py 0 in A, train.py 2 in B" in said.out
    assert command(tmp_path, a, b, "--json", "-") == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["schema"], found["kind"], found["fail_above"], found["failed"]) == (2, "compare", None, [])
    (loader,) = found["loaders"]
    mine, theirs = a["loaders"][0], b["loaders"][0]
    assert loader["ratio"]["samples_per_s"] == pytest.approx(theirs["samples_per_s"] / mine["samples_per_s"])
    assert loader["a"]["wait_s"] == pytest.approx(mine["wait_s"] / 15)
    assert loader["b"]["wait_share"] == pytest.approx(theirs["wait_s"] / (theirs["wait_s"] + theirs["step_s"]))
    fetch = theirs["stages"]["fetch"]["self_s"] / theirs["stages"]["worker"]["tasks"]
    assert loader["b"]["fetch_s"] == pytest.approx(fetch)
    assert loader["b"]["workers_bytes"] == sum(theirs["memory"]["worker_pss"])
    assert "workers_bytes" not in loader["a"]
    assert loader["settings"]["num_workers"] == [0, 2]
    assert "main_process_loading" in found["vanished"]


@pytest.mark.slow
def test_a_report_with_itself(real: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path) -> None:
    for r in real:
        found = compared(r, r, 0.0)
        assert not found.losses()
        assert not found.notes
        assert {round(ratio, 12) for ratio in found.pairs[0].ratio.values() if ratio is not None} == {1.0}
        assert not found.appeared
        assert not found.vanished
        assert command(tmp_path, r, r, "--fail-above", "0%") == 0


@pytest.mark.parametrize(
    ("after", "allowed", "code"),
    [
        (95.0, "5%", 0),
        (94.9, "5%", 1),
        (94.9, "0.05", 1),
        (94.9, "6%", 0),
        (0.0, "99%", 1),
        (300.0, "0", 0),
        (100.0, "0%", 0),
    ],
)
def test_the_exit_code_in_ci(
    after: float, allowed: str, code: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    args = ["--fail-above", allowed, "--json", str(out)]
    assert command(tmp_path, report(), report(samples_per_s=after), *args) == code
    said = capfd.readouterr()
    assert f"{after / 100:.2f}x" in said.out
    found = json.loads(out.read_text())
    assert found["loaders"][0]["loss"] == pytest.approx(1 - after / 100)
    assert len(found["failed"]) == code
    assert ("fewer samples/s than in A; --fail-above allows" in said.err) == bool(code)
    assert said.err.count("\n") == code


def test_without_samples_the_time_of_a_batch_decides(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    a, b = report(samples=0, samples_per_s=0.0), report(samples=0, samples_per_s=0.0, wait_s=3.0)
    assert command(tmp_path, a, b, "--fail-above", "20%") == 0
    assert command(tmp_path, a, b, "--fail-above", "19%") == 1
    assert "t.py:3: 20.0% more time for a batch than in A; --fail-above allows 19%\n" in capfd.readouterr().err
    nothing = report(batches=0, samples=0, samples_per_s=0.0, wait_s=0.0, step_s=0.0)
    assert command(tmp_path, nothing, nothing) == 0
    assert "0 batches of t.py:3: too few" in capfd.readouterr().out
    assert command(tmp_path, nothing, nothing, "--fail-above", "5%") == 2
    assert "nothing to compare" in capfd.readouterr().err


def test_loaders_are_matched_by_name_then_place_then_file() -> None:
    def names(*names: str) -> dict[str, Any]:
        r = report()
        r["loaders"] = [{**r["loaders"][0], "name": name} for name in names]
        return r

    def matched(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, str]]:
        return [(p.a.name, p.b.name) for p in compared(a, b).pairs]

    found = compared(names("/x/t.py:3", "u.py:1", "v.py:9"), names("w.py:2", "u.py:4", "/y/t.py:3"))
    assert [(p.a.name, p.b.name) for p in found.pairs] == [("/x/t.py:3", "/y/t.py:3"), ("u.py:1", "u.py:4")]
    assert (found.only_a, found.only_b) == (["v.py:9"], ["w.py:2"])
    assert [n for n in found.notes if "only" in n] == ["v.py:9 is in A only", "w.py:2 is in B only"]
    assert matched(names("t.py:3", "t.py:5"), names("t.py:5", "t.py:3")) == [("t.py:3", "t.py:3"), ("t.py:5", "t.py:5")]
    assert matched(names("t.py:3", "t.py:5"), names("t.py:5", "t.py:9"))[0] == ("t.py:3", "t.py:9")
    assert matched(names("t.py:3", "t.py:5", "u"), names("t.py:6", "t.py:8", "u")) == [("u", "u")]  # nobody can say
    with pytest.raises(UsageError, match=r"no loader is in both: a\.json has t\.py:3, b\.json has u\.py:3"):
        compared(names("t.py:3"), names("u.py:3"))
    with pytest.raises(UsageError, match="none at all"):
        compared(names(), names())


def test_what_stands_between_two_reports_is_said() -> None:
    machine = {"cores": 2, "memory": 8 << 30, "gpus": [], "python": "3.11.1", "platform": "linux"}
    other = {**machine, "cores": 16, "memory": 32 << 30, "gpus": [{"name": "H200"}]}
    notes = " ".join(compared(report(machine=machine), report(machine=other, partial=True, exit_code=-9)).notes)
    assert "not the same machine: cores 2 and 16, gpus none and H200, memory 8.0 GiB and 32.0 GiB" in notes
    assert "python" not in notes
    assert "B is partial" in notes
    assert "B is of a command that failed, with exit code -9" in notes
    near = {**machine, "memory": (8 << 30) + 4096}
    assert not compared(report(machine=machine), report(machine=near)).notes
    a = report(verdict="input-bound", findings=[{"cause": "x", "share": 0.5}, {"cause": "y", "share": 0.2}])
    b = report(verdict="healthy", findings=[{"cause": "y", "share": 0.3}, {"cause": "z", "share": 0.1}])
    found = compared(a, b)
    assert (found.appeared, found.vanished) == ({"z": 0.1}, {"x": 0.5})
    assert "verdict: input-bound -> healthy" in found.text()
    assert "new: z, which costs 10% of the loop" in found.text()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not a report of stoker run"),
        (b"\xff\xfe\x00", "is not a report of stoker run"),
        (b"{" * 10**6, "is not a report of stoker run"),
        (b"[" * 10**6, "is not a report of stoker run"),
        (b'{"schema": 2, "loaders": [], "x": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", "is not a report of stoker run"),
        (b'{"schema": NaN}', "is not a report of stoker run"),
        (b'{"schema": 2, "loaders": [], "findings": [{"cause": "x", "share": 1e999}]}', "is not a report"),
        (b"[1]", "Expected `object`, got `array`"),
        (b"null", "Expected `object`, got `null`"),
        ({"schema": 1}, "missing required field `loaders`"),
        (report(schema=3), "has schema 3, this stoker compares schema 1 to 2: make both reports with one version"),
        (report(schema=10**400), "is not a report"),
        (report(schema="1"), "Expected `int`, got `str` - at `$.schema`"),
        (report(schema=True), "Expected `int`, got `bool` - at `$.schema`"),
        ({**report(), "loaders": {}}, "Expected `array`, got `object` - at `$.loaders`"),
        ({**report(), "loaders": [5]}, "Expected `object`, got `int` - at `$.loaders[0]`"),
        (report(wait_s="long"), "Expected `float`, got `str` - at `$.loaders[0].wait_s`"),
        (report(wait_s=-11), "loop_s of a loader is not between 0 and 1e+15"),
        (report(wait_s=1e17), "loop_s of a loader is not between 0 and 1e+15"),
        (report(samples_per_s=-1), "samples_per_s of a loader is not between 0 and 1e+15"),
        (report(batches=10**400), "is not a report"),
        (report(name=5), "Expected `str`, got `int` - at `$.loaders[0].name`"),
        (report(stages={"fetch": {"self_s": "x"}}), "at `$.loaders[0].stages.fetch.self_s`"),
        (report(memory={"worker_pss": [1, None]}), "at `$.loaders[0].memory.worker_pss[1]`"),
        (report(settings={"num_workers": []}), "at `$.loaders[0].settings.num_workers`"),
        (report(machine={"memory": "much"}), "at `$.machine.memory`"),
        (report(findings=[{"share": 1.0}]), "missing required field `cause`"),
        (report(verdict=None), "Expected `str`, got `null` - at `$.verdict`"),
    ],
)
def test_what_is_no_report(content: Any, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for pair in ((content, report()), (report(), content)):
        assert command(tmp_path, *pair) == 2
        said = capfd.readouterr()
        assert words in said.err
        assert said.err.count("\n") == 1
        assert said.out == ""


def test_files_that_cannot_be_read(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ok = tmp_path / "ok.json"
    ok.write_text(json.dumps(report()))
    for path, words in (
        (tmp_path, "Is a directory"),
        (tmp_path / "none.json", "No such file"),
        (Path("/dev/zero"), "larger than 64 MiB"),
    ):
        assert cli.main(["compare", str(ok), str(path)]) == 2
        assert words in capfd.readouterr().err
    assert cli.main(["compare", str(ok), str(ok), "--json", str(tmp_path / "no" / "file")]) == 2
    for bad in ("5", "x", "-1%", "100%", "nan", "", "%"):
        assert cli.main(["compare", str(ok), str(ok), "--fail-above", bad]) == 2
    assert [loss(text) for text in ("5%", "0.05", "0", "12.5%")] == [0.05, 0.05, 0.0, 0.125]
    assert load(ok).path == str(ok)


def test_names_that_no_terminal_should_see() -> None:
    name = "x" * 500 + "\033[31mred\ud800\n.py:3"
    found = compared(report(name=name[490:]), report(name=name[490:], command=["a\rb"])).text()
    assert "red" in found
    assert "\033" not in found
    assert "\r" not in found
    found.encode()
    assert max(map(len, found.splitlines())) <= 80
    assert all(len(note) < 3 * NAME for note in compared(report(name=name), report(name=name, partial=True)).notes)


def test_colour_is_for_terminals(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(json.dumps(report(partial=True)))
    line = [sys.executable, "-m", "stoker", "compare", "a.json", "b.json"]
    env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS")} | {"TERM": "xterm"}
    main, side = pty.openpty()
    subprocess.run(line, cwd=tmp_path, env=env, stdout=side, check=True, timeout=60)
    os.close(side)
    shown = b""
    while chunk := _read(main):
        shown += chunk
    os.close(main)
    assert b"\033[1m" in shown
    assert b"is partial" in shown


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 16)
    except OSError:  # what a terminal says when its other side is closed
        return b""


numbers = st.one_of(st.integers(), st.floats(), st.sampled_from([1e15, 5e-324, 10**15, -0.0]))
leaves = st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=20))
anything = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
)


def survives(a: Any, b: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        code = command(Path(folder), a, b, "--fail-above", "5%")
        assert code in (0, 1, 2)
        out = Path(folder) / "out.json"
        if command(Path(folder), a, b, "--json", str(out)) == 0:
            json.loads(out.read_text(), parse_constant=pytest.fail)


@given(st.one_of(anything.map(lambda x: json.dumps(x).encode()), st.binary(max_size=200)))
@settings(max_examples=25)
def test_anything_for_a_report(content: bytes) -> None:
    survives(report(), content)


def places(data: Any) -> list[tuple[Any, Any]]:
    """Every place in nested lists and dicts, as the container and its key."""
    items = list(data.items()) if isinstance(data, dict) else list(enumerate(data)) if isinstance(data, list) else []
    return [(data, key) for key, _ in items] + [place for _, value in items for place in places(value)]


@given(st.data())
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@pytest.mark.slow
def test_a_real_report_with_anything_in_it(real: tuple[dict[str, Any], dict[str, Any]], data: st.DataObject) -> None:
    a, b = copy.deepcopy(real)
    for broken in data.draw(st.sampled_from([[b], [a], [a, b]])):
        container, key = data.draw(st.sampled_from(places(broken)))
        if data.draw(st.booleans()) and isinstance(container, dict):
            del container[key]
        else:
            container[key] = data.draw(anything)
    survives(a, b)


@given(st.floats(0, 1e15), st.floats(0, 1e15), st.floats(0, 1e15), st.integers(0, 10**15))
@settings(max_examples=50)
def test_any_numbers_fit_the_table(rate: float, wait: float, step: float, batches: int) -> None:
    found = compared(
        report(),
        report(samples_per_s=rate, wait_s=wait, step_s=step, batches=batches, memory={"worker_pss": [int(wait)]}),
    )
    assert max(map(len, found.text().splitlines())) <= 80
    json.dumps(found.as_dict(), allow_nan=False)
    pair: Pair = found.pairs[0]
    assert pair.loss == pytest.approx(1 - rate / 100)
