"""The pages in docs: their code runs, their commands exist, their diffs apply, and what is generated covers the source.

A comment ``<!-- python ... -->`` in a page holds code that its blocks need and a reader does not. A block behind
``<!-- wants a GPU -->`` runs only where there is one, and one behind ``<!-- wants a cluster -->`` in other tests.
"""

from __future__ import annotations

import difflib
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch

from benchmarks import pages, transcripts
from docs.generate import Uncovered, api, arguments, causes, check, commands, messages, reference, schema, variables
from stoker.commands.main import main, stoker
from tests.commands.helpers import forked, python

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"<!-- python\n(.*?)-->|(?:<!-- wants (.*?) -->\n)?```python\n(.*?)```", re.DOTALL)
HAVE: dict[str, Callable[[], bool]] = {
    "a GPU": torch.cuda.is_available,
    "a cluster": lambda: False,
    "a framework": lambda: False,  # tests/scripts/test_loggers.py
    "a job that hangs": lambda: False,  # tests/scripts/test_why.py
}
COMMAND = re.compile(r"(?m)^(?:    |\$ |    \$ )(?:\w+=\S+ )?stoker (.+)$")


def code_of(page: Path) -> str:
    """The code of a page's blocks, in their order."""
    found = BLOCK.findall(page.read_text())
    before = "dataset = list(range(100))" if page.name == "README.md" else ""  # whose words are counted
    blocks = [hidden or shown for hidden, what, shown in found if not what or HAVE[what]()]
    return "\n".join([before, *blocks])


WITH_CODE = [page for page in PAGES if code_of(page).strip()]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="stoker's own workers are on Linux")
def test_the_code_of_each_page_runs(tmp_path: Path) -> None:
    failed = {}
    for page in WITH_CODE:
        folder = tmp_path / str(page.relative_to(ROOT)).replace("/", "-")
        folder.mkdir()
        script = folder / "page.py"  # a file: code that is split needs its source
        script.write_text(code_of(page))
        done = python(script)
        if done.returncode:
            failed[folder.name] = done.stderr
    assert not failed


def test_there_are_pages_with_code() -> None:
    assert {"README.md", "faults.md", "resume.md", "equality.md"} <= {page.name for page in WITH_CODE}


def words_of(line: str) -> list[str]:
    return line.split("  ")[0].split(" #")[0].split(" > ")[0].split(" | ")[0].split()


def test_the_commands_of_each_page_exist() -> None:
    failed = []
    for page in PAGES:
        for line in COMMAND.findall(page.read_text()):
            try:
                parse(line)
            except (AssertionError, click.ClickException) as e:
                failed.append((page.name, line, str(e)))
    assert not failed


def parse(line: str) -> None:
    command: click.Command = stoker
    words = words_of(line)
    while isinstance(command, click.Group) and words and not words[0].startswith("-") and not words[0].isupper():
        found = command.get_command(click.Context(command), words.pop(0))
        assert found is not None, words
        command = found
    context = click.Context(command, **command.context_settings)
    command.make_parser(context).parse_args(words)  # raises for an option that is not there


FRAMEWORKS = sorted((ROOT / "docs" / "frameworks").glob("[!i]*.md"))


def test_the_diff_of_a_framework_is_about_its_script() -> None:
    wrong = []
    for page in FRAMEWORKS:
        text = page.read_text()
        (script,) = re.findall(r'--8<-- "(tests/scripts/.*?)"', text)
        lines = (ROOT / script).read_text().splitlines()
        for diff in re.findall(r"```diff\n(.*?)```", text, re.DOTALL):
            gone = [line[1:] for line in diff.splitlines() if line.startswith("-")]
            if len(diff.splitlines()) > 3 or not set(gone) <= set(lines):
                wrong.append((page.name, script, diff))
    assert not wrong


def test_each_framework_is_in_the_table() -> None:
    index = (ROOT / "docs" / "frameworks" / "index.md").read_text()
    assert {f"({page.name})" for page in FRAMEWORKS} == set(re.findall(r"\([\w-]+\.md\)", index))


def test_figures_about_other_loaders_are_those_of_the_benchmarks() -> None:
    measured = (ROOT / "benchmarks" / "README.md").read_text()
    figures = [
        (page.name, figure)
        for page in (ROOT / "docs" / "coming-from").glob("*.md")
        for figure in re.findall(r"(\d\.\d\d)\s+times", page.read_text())
    ]
    assert len(figures) >= 5
    assert [x for x in figures if f"| {x[1]}x |" not in measured] == []


# -------------------------------------------------------------------------------------------------------- transcripts


def shape(text: str) -> list[str]:
    """The words of a transcript, without figures, units and bars."""
    return re.findall(r"[A-Za-z_]{3,}", text)


def in_a_fork(line: list[str], cwd: Path, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
    """In the place of subprocess.run: stoker, or a script, in a fork of this process."""
    if line[1] == "-c":
        return run_process(line, cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def does() -> int:
        os.dup2(1, 2)
        sys.stderr = sys.stdout
        sys.path.insert(0, str(cwd))
        if line[1:3] == ["-m", "stoker"]:
            return main(line[3:])
        sys.argv = line[1:]
        runpy.run_path(line[1], run_name="__main__")
        return 0

    return forked(does, cwd, env)


run_process = subprocess.run
SHOWN = [
    (page, name)
    for page in pages.TRANSCRIPTS
    for name in re.findall(r"benchmarks\.transcripts (\w+)", page.read_text())
]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="stoker run is on Linux")
@pytest.mark.parametrize(("page", "name"), SHOWN, ids=[name for _, name in SHOWN])
def test_a_transcript_is_what_its_command_prints(
    page: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for figures, and findings that depend on what else the machine does."""
    found = re.search(
        r"-->\n```console\n(.*?)\n```\n<!-- end -->", page.read_text().split(f"transcripts {name} ")[1], re.DOTALL
    )
    assert found is not None, "python -m benchmarks.pages transcripts"
    # Smaller than the ones whose figures are shown.
    monkeypatch.setattr(transcripts, "PHOTOS", 40)
    monkeypatch.setattr(transcripts, "CLIPS", transcripts.CLIPS.replace("1000", "400"))
    monkeypatch.setattr(transcripts, "CROPS", transcripts.CROPS.replace("400", "100"))
    monkeypatch.setattr(transcripts, "SPECTRA", transcripts.SPECTRA.replace("500", "160"))
    monkeypatch.setattr(transcripts.subprocess, "run", in_a_fork)
    now = transcripts.NAMES[name](tmp_path)
    assert difflib.SequenceMatcher(None, shape(found[1]), shape(now), autojunk=False).ratio() > 0.8, now


def test_each_transcript_is_shown() -> None:
    assert {name for _, name in SHOWN} == set(transcripts.NAMES)


# ----------------------------------------------------------------------------------------------------- generated pages


@pytest.mark.slow
def test_what_is_generated_covers_the_source() -> None:
    made = reference.pages()
    assert made["reference/dataloader.md"].count("{ #on_error }") == 1
    assert "STOKER_CACHE" in made["reference/environment.md"]
    assert "## slow_decode" in made["reference/causes.md"]
    assert "stoker cache prune" in made["reference/commands.md"]
    assert "::: stoker.Staged" in made["reference/api.md"]
    assert "sample_timeout needs a worker process" in made["reference/messages.md"]
    assert "LoaderReport" in made["reference/report-schema.md"]


def holes() -> Iterator[tuple[Any, str, Any]]:
    yield arguments, "GROUPS", {k: v for k, v in arguments.GROUPS.items() if k != "Device"}
    yield api, "GROUPS", {k: v for k, v in api.GROUPS.items() if k != "Errors"}
    yield causes, "RULES", causes.RULES[1:]
    yield commands, "COMMANDS", {**commands.COMMANDS, "undocumented": ""}
    yield messages, "WHAT_TO_DO", {k: v for k, v in messages.WHAT_TO_DO.items() if k != "StateError"}
    yield schema, "DOCUMENTED", ROOT / "docs" / "gpu.md"
    yield variables, "OWN", {k: v for k, v in variables.OWN.items() if k != "STOKER_HOME"}


@pytest.mark.parametrize(("module", "name", "value"), list(holes()), ids=lambda x: getattr(x, "__name__", "") or "")
def test_a_hole_in_what_is_explained_is_an_error(module: Any, name: str, value: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, name, value)
    if module is commands:
        monkeypatch.setattr(type(stoker), "get_command", lambda self, context, word: click.Command("x", help="x"))
    with pytest.raises(Uncovered):
        module.page()


def test_each_rule_has_a_row_that_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    text = causes.page()["reference/causes.md"]
    assert text.count("**Found when:**") == len(set(causes.RULES)) + 3
    assert "**The report says:**" in text


# -------------------------------------------------------------------------------------------------- the check of a site

INDEX = '{"docs": [{"location": "index.html#a"}]}'


def site(folder: Path, body: str, index: str = INDEX) -> Path:
    (folder / "search").mkdir()
    (folder / "search" / "search_index.json").write_text(index)
    (folder / "index.html").write_text(f"<html><article><h1 id='top'>x</h1>{body}</article></html>")
    return folder


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("<a href='#top'>a</a><a href='index.html#top'>b</a><a href='https://pytorch.org'>c</a>", None),
        ("<a href='gone.html'>a</a>", "gone.html leads nowhere"),
        ("<a href='#bottom'>a</a>", "#bottom: no such anchor"),
        ("<img src='gone.png'>", "gone.png leads nowhere"),
        ("<script src='https://cdn.example/x.js'></script>", "fetches https://cdn.example/x.js"),
        ("<p>three things:\n- one\n- two</p>", "a list became text"),
    ],
)
def test_the_check_of_a_site(body: str, said: str | None, tmp_path: Path) -> None:
    found = check.wrong(site(tmp_path, body))
    assert (found == []) if said is None else (len(found) == 1 and said in found[0])


def test_the_check_of_the_search_and_of_styles(tmp_path: Path) -> None:
    (tmp_path / "a.css").write_text("@import 'https://fonts.example/x';")
    found = check.wrong(site(tmp_path, "", '{"docs": []}'))
    assert found == ["a.css fetches something from elsewhere", "the search does not know index.html"]
    assert check.main([str(tmp_path)]) == 1
    assert check.main([str(tmp_path / "nowhere")]) == 2
