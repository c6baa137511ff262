"""``stoker explain``: answers a question about data loading from the pages that ship with stoker, offline."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path
from posixpath import join, normpath
from typing import TextIO

import click
from click.shell_completion import CompletionItem

from ..core import output
from ..core.errors import StokerError
from ..core.terminal import colour_wanted, console, style, width
from ..core.types import JsonObject
from ..diagnosis import pages, search
from ..diagnosis.pages import Page
from . import arguments

SCHEMA = 2
MOST = 3  # most answers to a question
MAX_QUOTED = 60  # characters quoted of a question that no page answers
MAX_COLUMNS = 100  # longer lines are hard to read
HOW_TO_ASK = """\
Ask in your own words, for example: stoker explain "gpu is at 30 percent"
stoker explain NAME prints a whole page. NAME is a name from this list, or a cause."""


def _names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    names = [name for page in (*pages.symptoms(), *pages.guides()) for name in (page.name, *page.causes)]
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


@arguments.command("explain")
@click.argument("words", metavar="[QUESTION|CAUSE|PAGE]...", nargs=-1, shell_complete=_names)
@arguments.json_file
def command(words: tuple[str, ...], json_path: Path | None) -> int:
    """Answer a question about data loading, or explain a cause that stoker run names.

    A question in plain words gets three answers at most: what it means, what to do, and which page says more. The name
    of a cause or a page prints the whole page. Without a question, all symptoms are listed. Exit code 1: no page has
    any of the words.

    \b
    Examples:
      stoker explain "gpu is at 30 percent"
      stoker explain how do I use this with Lightning
      stoker explain slow_decode
    """
    question = " ".join(words)
    if not question.strip():
        listed_pages = [_entry(page) for page in (*pages.symptoms(), *pages.guides())]
        output.give({"schema": SCHEMA, "pages": listed_pages}, json_path, lambda: print(listed(sys.stdout)))
        return 0
    found = search.find(question)[:MOST]
    if not found:
        raise StokerError(
            f"no page has a word of {question[:MAX_QUOTED]!r}; stoker explain without words lists all symptoms"
        )
    whole = search.is_name(question)
    answers = [
        {**_entry(page), "means": page.means, "do": page.remedy, "command": page.command}
        | ({"text": page.text} if whole else {})
        for page in found
    ]
    result: JsonObject = {"schema": SCHEMA, "asked": question, "answers": answers}
    show = render(found[0], sys.stdout) if whole else answered(found, sys.stdout)
    output.give(result, json_path, lambda: print(show))
    return 0


def _entry(page: Page) -> JsonObject:
    return {"name": page.name, "title": page.title, "causes": list(page.causes), "page": page.path}


def listed(stream: TextIO) -> str:
    """Lists all symptoms, each with the page's name and causes below it, and says how to ask."""
    colour = colour_wanted(stream)
    lines = []
    for page in pages.symptoms():
        lines += [style(page.title, "bold", colour), f"    {', '.join((page.name, *page.causes))}"]
    return "\n".join([*lines, "", HOW_TO_ASK])


def answered(found: list[Page], stream: TextIO) -> str:
    """Renders the answers to a question: what each page's title means, what to do, the command and the page."""
    colour, columns = colour_wanted(stream), min(MAX_COLUMNS, width(stream))
    lines: list[str] = []
    for page in found:
        lines += [style(page.title, "bold", colour)]
        for text in (page.means, f"What to do: {page.remedy}" if page.remedy else ""):
            lines += textwrap.wrap(text, columns, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
        if page.command:
            lines.append(f"  Command: {style(page.command, 'cyan', colour)}")
        lines += [f"  More: stoker explain {page.name}", ""]
    return "\n".join(lines[:-1])


def render(page: Page, stream: TextIO) -> str:
    """Renders a whole page as text no wider than the stream, styled only on a terminal."""
    from rich.markdown import Markdown
    from rich.theme import Theme

    def linked(link: re.Match[str]) -> str:
        target = normpath(join(page.path, "..", link[1]))
        symptom = re.fullmatch(r"docs/symptoms/([\w-]+)\.md", target)
        return f"`stoker explain {symptom[1]}`" if symptom else target

    text = re.sub(r"(?<!!)\[[^]]*\]\((?!\w+:|#)([^)#]+)(?:#[^)]*)?\)", linked, page.text)
    there = console(stream)
    with there.use_theme(Theme({"markdown.code": "cyan"})), there.capture() as captured:
        there.print(Markdown(text, code_theme="ansi_dark", hyperlinks=False), width=min(MAX_COLUMNS, width(stream)))
    lines = [style(page.title, "bold", colour_wanted(stream)), "", captured.get().strip("\n")]
    if page.causes:
        lines += ["", f"causes: {', '.join(page.causes)}"]
    plain = "\n".join(line.rstrip() for line in "\n".join(lines).split("\n"))
    return re.sub(r"\n{3,}", "\n\n", plain)
