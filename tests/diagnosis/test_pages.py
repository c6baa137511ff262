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
from stoker.diagnosis import pages
from stoker.diagnosis.doctor.verdict import CAUSES, REMEDY, STALE
from stoker.diagnosis.pages import Page
from stoker.diagnosis.search import find

SRC = Path(stoker.__file__).parents[1]
PAGES = pages.symptoms()
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


def quotes(page: Page) -> list[str]:
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
    listed = re.findall(r"^- \[(.+)\]\((.+)\.md\)$", (pages.FOLDER / "index.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted((page.title, page.name) for page in PAGES)


def test_what_people_type_finds_the_page() -> None:
    assert {asked: find(asked)[0].name for asked in ASKED} == ASKED


def test_a_title_finds_its_page() -> None:
    assert [find(page.title)[0].name for page in PAGES] == [page.name for page in PAGES]


def test_a_cause_or_a_name_is_one_page(capsys: pytest.CaptureFixture[str]) -> None:
    names = [page.name for page in (*PAGES, *pages.guides())]
    for question in (*known(), *names):
        assert len(find(question)) == 1, question
    assert len({*names}) == len(names)
    assert main(["explain", "slow_decode"]) == 0
    shown = capsys.readouterr().out
    assert "Decoding images takes most of the time" in shown
    assert "**" not in shown
    assert "causes: slow_decode" in shown


def test_a_question_gets_three_answers_at_most(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "gpu is at 30 percent"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("GPU utilization is low\n  nvidia-smi shows 0 to 50 %")
    assert "  What to do: stoker run --apply train.py runs the same script" in shown
    assert "  Command: stoker run --apply train.py\n  More: stoker explain gpu-idle\n" in shown
    assert main(["explain", "slow", "workers"]) == 0
    assert capsys.readouterr().out.count("  More: stoker explain ") == 3


def test_answers_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--json", "-", "memory of workers"]) == 0
    best, *others = json.loads(capsys.readouterr().out)["answers"]
    assert (best["name"], best["page"]) == ("memory-grows", "docs/symptoms/memory-grows.md")
    assert best["means"].startswith("Each worker uses as much memory")
    assert "stoker.share" in best["do"]
    assert len(others) <= 2
    assert main(["explain", "--json", "-", "docs/tune.md"]) == 0
    (only,) = json.loads(capsys.readouterr().out)["answers"]
    assert only["command"] == "stoker tune train.py:make_loader"
    assert "## " in only["text"]


def test_each_page_has_an_answer() -> None:
    for page in (*PAGES, *pages.guides()):
        assert page.means.endswith((".", ":")), page.name
        assert 20 < len(page.means) < 500, page.name
        assert not re.search(r"[`*]|\]\(|<!--", page.means + page.remedy), page.name
        assert page.remedy or page.is_guide, page.name
        assert page.command or page.is_guide, page.name


def test_pages_that_ship_are_those_of_docs() -> None:
    """All but what is for people who change stoker, or needs a browser."""
    docs = pages.HERE.parents[2] / "docs"
    there = {path.name for path in docs.glob("*.md")} - {
        "index.md",
        "architecture.md",
        "release.md",
        "scale.md",
        "versions.md",
    }
    assert {path.name for path in pages.GUIDES.glob("*.md")} == there
    assert all(path.resolve().is_relative_to(docs) for path in pages.GUIDES.iterdir())


def test_a_misspelled_word_is_found() -> None:
    assert find("slow_dekode")[0].name == "slow-decode"
    assert find("lightening")[0].name == "docs/frameworks/lightning.md"


@pytest.mark.parametrize("asked", ["xyzzy", "\x1b[31m", "?", "x" * 5000, "how do I"])
def test_words_of_no_page_are_an_error(asked: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", asked]) == 1
    err = capsys.readouterr().err
    assert "stoker explain without words lists all symptoms" in err
    assert "\x1b" not in err
    assert len(err) < 200


def test_without_words_all_symptoms_are_listed_and_it_says_how_to_ask(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    shown = capsys.readouterr().out
    assert all(page.title in shown and page.name in shown for page in PAGES)
    assert 'for example: stoker explain "gpu is at 30 percent"' in shown
    assert main(["explain", "--json", "-"]) == 0
    assert len(json.loads(capsys.readouterr().out)["pages"]) == len(PAGES) + len(pages.guides())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_each_page_fits_forty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    for page in PAGES:
        shown = explain.render(page, io.StringIO())
        assert "\x1b" not in shown, page.name
        assert "../" not in shown, page.name
        last = shown.splitlines()[-1]
        wide = [line for line in shown.splitlines() if len(line) > 40]
        assert wide in ([], [page.title], [last], [page.title, last]), page.name


def test_only_a_terminal_gets_styles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1m" in explain.render(PAGES[0], Terminal())
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in explain.render(PAGES[0], Terminal())


def test_explaining_imports_no_torch() -> None:
    code = "import sys; from stoker.commands.main import main; main(['explain', 'oom']); print('torch' in sys.modules)"
    p = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert p.stdout.splitlines()[-1] == "False"
