"""Pages about symptoms: what each looks like, what ``stoker run`` prints, and the fix, with stoker and without.

``docs/symptoms`` has one Markdown file per symptom. ``symptoms`` beside this module is a symbolic link to that folder,
so the site and ``stoker explain`` show the same text. A page begins with a head::

    ---
    title: The first epoch is slow
    words: cold cache nfs s3      search terms beyond those in the title
    causes: cold_cache            the doctor's causes that the page explains, separated by commas; may be empty
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
    """One page. ``name`` is the file's stem; ``text`` is the Markdown after the head."""

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
    """Parses the text of a page's file."""
    _, head, text = source.split("---\n", 2)
    entries = dict(re.findall(r"(?m)^(\w+):[ ]?(.*)$", head))
    causes = tuple(cause for cause in entries["causes"].replace(",", " ").split())
    return Symptom(name, entries["title"], entries["words"], causes, text.strip())


def find(question: str) -> list[Symptom]:
    """Returns the pages with this name or cause, or else those whose head contains every word of the question.

    Pages with every word in the title come first.

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
