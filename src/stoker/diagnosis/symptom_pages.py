"""Pages about symptoms: what it looks like, what ``stoker run`` prints, and the fix, with stoker and without.

``docs/symptoms`` has one Markdown file a symptom. The folder beside this module is a link to it, so the site and
``stoker explain`` show the same text. A page begins with a head::

    ---
    title: The first epoch is slow
    words: cold cache nfs s3      what people type, beside the title
    causes: cold_cache            causes of the doctor that it explains, with commas; may be empty
    ---
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "symptoms"
INDEX = "index"  # the page that lists the others


@dataclass(frozen=True)
class Symptom:
    """One page; ``name`` is that of its file, and ``text`` is Markdown without the head."""

    name: str
    title: str
    words: str
    causes: tuple[str, ...]
    text: str


@functools.cache
def pages() -> tuple[Symptom, ...]:
    found = (parse(path.stem, path.read_text("utf-8")) for path in FOLDER.glob("*.md") if path.stem != INDEX)
    return tuple(sorted(found, key=lambda page: page.title.lower()))


def parse(name: str, source: str) -> Symptom:
    """A page of the text of its file."""
    _, head, text = source.split("---\n", 2)
    entries = dict(re.findall(r"(?m)^(\w+):[ ]?(.*)$", head))
    causes = tuple(cause for cause in entries["causes"].replace(",", " ").split())
    return Symptom(name, entries["title"], entries["words"], causes, text.strip())


def find(question: str) -> list[Symptom]:
    """The page with this name or cause; else the pages whose head has each of the words, those with all in the title
    first.

    Example:
        >>> [page.name for page in find("bus error")]
        ['bus-error']
    """
    asked = question.strip().lower()
    exact = [page for page in pages() if asked == page.name or asked in page.causes]
    if exact:
        return exact
    words = _words(question)
    having = [page for page in pages() if words and words <= _words(f"{page.title} {page.name} {page.words}")]
    return sorted(having, key=lambda page: not words <= _words(page.title))


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))
