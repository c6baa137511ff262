"""Pages about symptoms: each cause has one, and what they quote is what the source says."""

from __future__ import annotations

import ast
import functools
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import stoker
from stoker.commands import explain
from stoker.commands.main import main
from stoker.diagnosis import symptom_pages
from stoker.diagnosis.doctor.verdict import CAUSES, REMEDY, STALE
from stoker.diagnosis.symptom_pages import Symptom, find

SRC = Path(stoker.__file__).parents[1]
PAGES = symptom_pages.pages()
PARTS = ("What it looks like.", "What `stoker run` prints.", "With stoker.", "Without stoker.")
SPEAKING = (
    "stoker/core",
    "stoker/diagnosis",
    "stoker/loader",
    "stoker/workers",
    "stoker_ray",
)  # packages that pages quote
MIN_LITERAL = 10  # characters that a template has of its own; one with fewer fits anything
ASKED = {
    "gpu idle": "gpu-idle",
    "GPU utilization": "gpu-idle",
    "bus error": "bus-error",
    "memory grows": "memory-grows",
    "how many workers": "how-many-workers",
    "nfs": "first-epoch-slow",
    "torchdata": "stateful-dataloader",
}


@functools.cache
def templates() -> tuple[tuple[str, str], ...]:
    """What the source can say, line by line: a pattern with anything for each value, and its longest own text."""
    out = []
    for path in (path for package in SPEAKING for path in (SRC / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            values = node.values if isinstance(node, ast.JoinedStr) else [node]
            said = "".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in values)
            for line in said.split("\n"):
                if len(line.replace("\0", "").strip()) >= MIN_LITERAL:
                    out.append((max(line.split("\0"), key=len), re.escape(line).replace("\0", ".*")))
    return tuple(out)


def is_said(text: str) -> bool:
    """Whether the source can say a text: at once, or as one text after another."""
    if any(own in text and re.fullmatch(pattern, text) for own, pattern in templates()):
        return True
    ends = [m.start() for m in re.finditer(r"(?<=[.:]) ", text)]
    return any(is_said(text[end + 1 :]) and is_said(text[:end]) for end in ends)


def quotes(page: Symptom) -> list[str]:
    return re.findall(r"(?m)^    (.+)$", page.text)


def test_each_page_has_its_parts_and_is_short() -> None:
    for page in PAGES:
        assert re.findall(r"(?m)^\*\*(.+?)\*\*", page.text) == list(PARTS), page.name
        prose = [line for line in page.text.splitlines() if line.strip() and not line.startswith("    ")]
        assert len(prose) <= 12, page.name
        assert max(map(len, prose)) <= 130, page.name


def test_what_a_page_quotes_is_what_stoker_prints() -> None:
    unsaid = []
    for page in PAGES:
        assert quotes(page) or "Nothing" in page.text, page.name
        for quote in quotes(page):
            cause = rf"(?:{'|'.join(known())}): (?:costs \d+% of the loop\. )?"
            text = re.sub(rf"^stoker: [\w-]+: |^{cause}|, predicted \d+\.\d\dx$", "", quote)
            if not is_said(text):
                unsaid.append((page.name, text))
    assert not unsaid


def known() -> list[str]:
    return [*CAUSES, REMEDY.__name__, STALE]


@pytest.mark.parametrize("text", ["use more cores", "workers idle during the short ones"])
def test_a_made_up_text_is_noticed(text: str) -> None:
    assert not is_said(text)


def test_each_cause_has_one_page() -> None:
    explained = sorted(cause for page in PAGES for cause in page.causes)
    assert explained == sorted(known())


def test_the_index_lists_all_pages() -> None:
    listed = re.findall(r"^- \[(.+)\]\((.+)\.md\)$", (symptom_pages.FOLDER / "index.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted((page.title, page.name) for page in PAGES)


def test_what_people_type_finds_the_page() -> None:
    assert {asked: find(asked)[0].name for asked in ASKED} == ASKED


def test_a_title_finds_its_page() -> None:
    assert [find(page.title)[0].name for page in PAGES] == [page.name for page in PAGES]


def test_a_cause_or_a_name_is_one_page(capsys: pytest.CaptureFixture[str]) -> None:
    for question in (*known(), *(page.name for page in PAGES)):
        assert len(find(question)) == 1, question
    assert main(["explain", "slow_decode"]) == 0
    shown = capsys.readouterr().out
    assert "Decoding images takes most of the time" in shown
    assert "causes: slow_decode" in shown
    assert "other pages" not in shown


def test_words_give_a_page_and_name_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "slow", "workers"]) == 0
    assert re.findall(r"(?m)^    stoker explain [\w-]+$", capsys.readouterr().out)
    assert main(["explain", "--json", "-", "memory of workers"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["page"]["name"] == "memory-grows"


@pytest.mark.parametrize("asked", ["xyzzy", "slow_dekode", "\x1b[31m", "?", "x" * 5000])
def test_words_of_no_page_are_an_error(asked: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", asked]) == 1
    err = capsys.readouterr().err
    assert "stoker explain without words lists all pages" in err
    assert "\x1b" not in err
    assert len(err) < 200


def test_without_words_all_pages_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    shown = capsys.readouterr().out
    assert all(page.title in shown and page.name in shown for page in PAGES)
    assert main(["explain", "--json", "-"]) == 0
    assert len(json.loads(capsys.readouterr().out)["pages"]) == len(PAGES)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_each_page_fits_forty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    for page in PAGES:
        shown = explain.render(page, [], io.StringIO())
        assert "\x1b" not in shown, page.name
        assert "../" not in shown, page.name
        last = shown.splitlines()[-1]
        wide = [line for line in shown.splitlines() if len(line) > 40]
        assert wide in ([], [page.title], [last], [page.title, last]), page.name


def test_only_a_terminal_gets_styles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1m" in explain.render(PAGES[0], [], Terminal())
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in explain.render(PAGES[0], [], Terminal())


def test_explaining_imports_no_torch() -> None:
    code = "import sys; from stoker.commands.main import main; main(['explain', 'oom']); print('torch' in sys.modules)"
    p = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert p.stdout.splitlines()[-1] == "False"
