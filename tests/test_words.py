"""The language of what users read: README, docs, pages about symptoms, ``--help``.

No word of words.txt, no sentence over thirty words, no heading that says that something is done without saying by whom.
words-allowed.txt has the exceptions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.commands.helpers import help_texts

ROOT = Path(__file__).parent.parent
MAX_WORDS = 30
PASSIVE = re.compile(  # not "the script that is tested"
    r"(?<!that )(?<!which )\b(?:is|are|was|were|be|been|being)\s+(?:not\s+)?(?:\w+ly\s+)?"
    r"(?:\w+ed|\w+en|found|made|kept|done|shown|read|built|held|sent|lost|known|said|put|cut|run)\b(?!.*\bby\b)"
)
CODE = re.compile(r"^( *)(```|~~~).*?^\1\2`*$", re.MULTILINE | re.DOTALL)
HIDDEN = re.compile(r"<!--.*?-->|<[^>]+>", re.DOTALL)
LINK = re.compile(r"!?\[([^]]*)\]\([^)]*\)|\{[^}]*\}")
BEGINS = re.compile(r"^\s*(?:[-*]|\d+\.|!!!|\?\?\?)\s+")  # of a list's item, and of a box
INDENTED = "    "


def pairs(name: str) -> list[list[str]]:
    """The lines of a file, by their columns."""
    lines = (Path(__file__).parent / name).read_text().splitlines()
    return [[cell.strip() for cell in line.split(" | ")] for line in lines if line and not line.startswith("#")]


WORDS = [(re.compile(pattern, re.IGNORECASE), instead) for pattern, instead in pairs("words.txt")]
ALLOWED = [tuple(columns) for columns in pairs("words-allowed.txt")]
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text() for page in sorted(PAGES)}
HELP = {f"{command} --help": text for command, text in help_texts(columns=1000)}


def blocks(text: str) -> Iterator[tuple[bool, str]]:
    """Headings (True), and paragraphs, items and cells (False), without code. A page's head has its title."""
    text = re.sub(r"\A---\ntitle: (.*)\n(?:.*\n)*?---\n", r"# \1\n\n", text)
    text = LINK.sub(lambda m: m[1] or "", re.sub(r"`+[^`\n]+`+", "code", HIDDEN.sub("", CODE.sub("\n", text))))
    block, in_list, blank = "", False, True
    for line in [*text.splitlines(), ""]:
        begins, heading = bool(BEGINS.match(line)), line.startswith("#")
        is_code = blank and line.startswith(INDENTED) and not in_list
        if block and (not line.strip() or begins or heading or line.startswith("|")):
            yield False, block
            block = ""
        if heading:
            yield True, line.strip("# ")
        elif line.startswith("|"):
            yield from ((False, cell.strip()) for cell in line.split("|") if cell.strip(" -:"))
        elif not is_code:
            block = f"{block} {BEGINS.sub('', line).strip()}".strip()
        in_list = begins or (in_list and (not line.strip() or line.startswith("  ")))
        blank = not line.strip() or is_code


def found(text: str) -> Iterator[str]:
    """What is wrong with the language of a page."""
    for is_heading, block in blocks(text):
        if is_heading and PASSIVE.search(block):
            yield f"a heading without an actor: {block}"
        for sentence in re.split(r"(?<=[.!?])[\"')*]*\s+", block):
            words = re.findall(r"\w[\w'.,/-]*", sentence)
            if len(words) > MAX_WORDS:
                yield f"{len(words)} words: {sentence}"
            for pattern, instead in WORDS:
                if pattern.search(sentence):
                    yield f'"{pattern.search(sentence)[0]}", say {instead}: {sentence}'  # type: ignore[index]


def is_allowed(name: str, finding: str) -> bool:
    return any(fnmatch(name, page) and (part == "*" or part in finding) for page, part, _ in ALLOWED)


def test_each_page_is_in_plain_words() -> None:
    texts = TEXTS | {name: re.sub(r"\n +", "\n\n", text.partition("Examples:")[0]) for name, text in HELP.items()}
    assert len(texts) > 100
    wrong = [(name, finding) for name, text in texts.items() for finding in found(text)]
    assert [(name, finding) for name, finding in wrong if not is_allowed(name, finding)] == []


def test_an_exception_has_a_reason_and_is_needed() -> None:
    findings = [(name, finding) for name, text in TEXTS.items() for finding in found(text)]
    for page, part, reason in ALLOWED:
        assert reason
        assert any(fnmatch(name, page) and (part == "*" or part in finding) for name, finding in findings), (page, part)


LONG = " ".join(["word"] * 31)


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        (f"Short. {LONG}. Short.", "31 words"),
        (f"- item\n- {LONG}", "31 words"),
        ("Mend the sample.", "say fix"),
        ("| a | nobody |", "name who it is"),
        ("## What is measured", "a heading without an actor"),
        ("---\ntitle: How it is found\nwords: x\n---\ntext", "a heading without an actor"),
    ],
)
def test_what_is_wrong_is_found(text: str, finding: str) -> None:
    assert [finding in said for said in found(text)] == [True]


@pytest.mark.parametrize(
    "text",
    [
        f"```\n{LONG} mend\n```",
        f"Text:\n\n    {LONG}\n\nText `{LONG}` and [link](mend.md).",
        "\n".join([f"- item {i}" for i in range(31)]),
        "| " + " | ".join(["word"] * 31) + " |",
        "## What `stoker run` measures",
        "## Samples that are made by workers",
    ],
)
def test_code_lists_and_tables_are_no_long_sentences(text: str) -> None:
    assert list(found(text)) == []
