"""``stoker explain``: shows the page about a symptom, offline."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TextIO

import click

from ..core import output
from ..core.errors import StokerError
from ..core.terminal import colour_wanted, console, style, width
from ..core.types import JsonObject
from ..diagnosis import symptom_pages
from ..diagnosis.symptom_pages import Symptom
from . import arguments

SCHEMA = 1
MORE = 3  # most other pages that are named
MAX_QUOTED = 60  # characters quoted of a question that no page answers
MAX_COLUMNS = 100  # longer lines are hard to read


@arguments.command("explain")
@click.argument("words", metavar="[CAUSE|WORDS]...", nargs=-1)
@arguments.json_file
def command(words: tuple[str, ...], json_path: Path | None) -> int:
    """Explain a cause that stoker run names, or a symptom by words of its title.

    A page says what the symptom looks like, what stoker run prints then, and the fix, with stoker and without it.
    Without words all pages are listed. Exit code 1: no page has all of the words.

    \b
    Examples:
      stoker explain slow_decode
      stoker explain gpu utilization
    """
    question = " ".join(words)
    if not question.strip():
        found = {"schema": SCHEMA, "pages": [_entry(page) for page in symptom_pages.pages()]}
        output.give(found, json_path, lambda: print(listed(sys.stdout)))
        return 0
    pages = symptom_pages.find(question)
    if not pages:
        raise StokerError(
            f"no page contains all words of {question[:MAX_QUOTED]!r}; stoker explain without words lists all pages"
        )
    best, others = pages[0], pages[1 : 1 + MORE]
    result = {"schema": SCHEMA, "asked": question, "page": {**_entry(best), "text": best.text}}
    result["others"] = [_entry(page) for page in others]
    output.give(result, json_path, lambda: print(render(best, others, sys.stdout)))
    return 0


def _entry(page: Symptom) -> JsonObject:
    return {"name": page.name, "title": page.title, "causes": list(page.causes)}


def listed(stream: TextIO) -> str:
    """Lists all pages: each title, with the page's name and causes below it."""
    colour = colour_wanted(stream)
    lines = []
    for page in symptom_pages.pages():
        lines += [style(page.title, "bold", colour), f"    {', '.join((page.name, *page.causes))}"]
    return "\n".join(
        [*lines, "", "stoker explain NAME prints a page. NAME can also be a cause or words from the title."]
    )


def render(page: Symptom, others: list[Symptom], stream: TextIO) -> str:
    """Renders a page and the names of others as text no wider than the stream, styled only on a terminal."""
    from rich.markdown import Markdown
    from rich.theme import Theme

    text = re.sub(r"\[[^]]*\]\(\.\./([^)#]+)\)", r"docs/\1", page.text)
    text = re.sub(r"\[[^]]*\]\(([\w-]+)\.md\)", r"`stoker explain \1`", text)
    there = console(stream)
    with there.use_theme(Theme({"markdown.code": "cyan"})), there.capture() as captured:
        there.print(Markdown(text, code_theme="ansi_dark", hyperlinks=False), width=min(MAX_COLUMNS, width(stream)))
    lines = [style(page.title, "bold", colour_wanted(stream)), "", captured.get().strip("\n")]
    if page.causes:
        lines += ["", f"causes: {', '.join(page.causes)}"]
    if others:
        lines += ["", "other pages:", *(f"    stoker explain {other.name}" for other in others)]
    plain = "\n".join(line.rstrip() for line in "\n".join(lines).split("\n"))
    return re.sub(r"\n{3,}", "\n\n", plain)
