"""Pages about symptoms: what it looks like, what ``stoker run`` prints, and the fix, with stoker and without.

``docs/symptoms`` has one Markdown file a symptom. The folder beside this module is a link to it, so the site and
``stoker explain`` show the same text. A page begins with a head::

    ---
    title: The first epoch is slow
    words: cold cache nfs s3      what people type, beside the words of the title
    causes: cold_cache            causes of the doctor that it explains, with commas; may be empty
    ---
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "symptoms"
INDEX = "index"  # the page that lists the others
IN_TITLE, IN_HEAD, IN_TEXT = 4, 3, 1  # what one common word counts
ENDING = re.compile(r"(?<=\w{3})(?:ing|ers?|ed|es|s|e)$")  # so that "hangs" is "hang", and "loaders" is "load"
LITTLE = re.compile(  # words that say nothing
    r"(?:a|an|and|are|as|at|be|but|by|can|do|does|for|from|get|has|have|how|i|in|is|it|its|me|my|not|"
    r"of|on|or|so|than|that|the|then|there|this|to|was|what|when|where|which|while|why|will|with|you|your)"
)


@dataclass(frozen=True)
class Symptom:
    """One page; ``name`` is that of its file, and ``text`` is Markdown without the head."""

    name: str
    title: str
    words: str
    causes: tuple[str, ...]
    text: str

    @functools.cached_property
    def weights(self) -> Mapping[str, int]:
        """What each of the page's words counts."""
        out: dict[str, int] = {}
        for part, weight in ((self.text, IN_TEXT), (self.head, IN_HEAD), (self.title, IN_TITLE)):
            out.update(dict.fromkeys(words_of(part), weight))
        return out

    @property
    def head(self) -> str:
        return f"{self.words} {self.name} {' '.join(self.causes)}"


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


def words_of(text: str) -> list[str]:
    """The words that say something, without their endings.

    Example:
        >>> words_of("My GPU waits for the DataLoader")
        ['gpu', 'wait', 'dataload']
    """
    return [ENDING.sub("", word) for word in re.findall(r"\w+", text.lower()) if not LITTLE.fullmatch(word)]


def ranked(question: str, among: Iterable[Symptom] | None = None) -> list[Symptom]:
    """The pages that answer a question, the best first.

    A page's own name and a cause of the doctor have one page each. Other questions are compared word by word, and a
    word counts less the more pages have it.

    Args:
        question: a cause (``"slow_decode"``), a page's name, or words.
        among: pages; None: all.

    Example:
        >>> [page.name for page in ranked("bus error")][0]
        'bus-error'
    """
    known = pages() if among is None else tuple(among)
    key = question.strip().lower()
    exact = [page for page in known if key == page.name or key in page.causes]
    if exact:
        return exact
    asked = dict.fromkeys(words_of(question))
    spread = {word: sum(word in page.weights for page in known) for word in asked}
    scores = {page.name: sum(page.weights.get(word, 0) / max(1, spread[word]) for word in asked) for page in known}
    return sorted((page for page in known if scores[page.name]), key=lambda page: -scores[page.name])


def nearest(question: str) -> list[str]:
    """Up to three words or causes that are spelled most like the question."""
    known = {word for page in pages() for word in re.findall(r"\w+", f"{page.title} {page.head}".lower())}
    asked = [question.strip().lower().replace(" ", "_"), *re.findall(r"\w+", question.lower())]
    close = [difflib.get_close_matches(part, known, 3) for part in asked if not LITTLE.fullmatch(part)]
    return list(dict.fromkeys(word for words in close for word in words))[:3]
