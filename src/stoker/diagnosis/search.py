"""Finds the pages that answer a question in plain words: by the rarity of its words, and by where a page has them."""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections import Counter

from .pages import Page, guides, symptoms

IN_HEAD, IN_TEXT = 3.0, 1.0  # what a word counts that a page has in its title or search terms, or in its text
RELATED = 0.5  # of the best page's score; a page below that is not shown
CLOSE = 0.8  # ratio of difflib, from which an unknown word is taken for a misspelled one
MAX_LETTERS = 30  # longer words are not compared with known ones
COMMON = """
a about am an and any are as at be but by can cannot could did do does doing for from get gets getting give have
having how i if im in into is it its just keep keeps like me my no not of on only or other our really s so some t
than that the their them then there they this to too use used using very want was way we what when where which why
will with without would you your pytorch torch stoker
"""  # words that say nothing about a page
WITHOUT_MEANING = frozenset(COMMON.split())


def find(question: str) -> list[Page]:
    """Returns the page with this name or cause; or else the pages that answer the question, the best first.

    Example:
        >>> [page.name for page in find("my gpu is at 30 percent")][0]
        'gpu-idle'
    """
    return _named(question)[:1] or _ranked(question)


def is_name(question: str) -> bool:
    """Returns whether this is the name of a page or of a cause, rather than a question in words."""
    return bool(_named(question))


def _named(question: str) -> list[Page]:
    asked = question.strip().lower()
    return [page for page in (*symptoms(), *guides()) if asked in (page.name, page.path, *page.causes)]


def _ranked(question: str) -> list[Page]:
    index = _index()
    terms = {_known(term, index.pages_with) for term in _terms(question)}
    scores = {page: sum(index.score(term, page) for term in terms) for page in index.pages}
    best = max(scores.values(), default=0.0)
    found = [page for page in index.pages if best and scores[page] >= RELATED * best]
    return sorted(found, key=lambda page: -scores[page])


class _Words:
    """The words of all pages. ``pages_with``: in how many pages each stem is."""

    def __init__(self) -> None:
        self.pages = (*symptoms(), *guides())
        self._title = {page: set(_terms(page.title)) for page in self.pages}
        self._words = {page: set(_terms(f"{page.name} {page.words} {' '.join(page.causes)}")) for page in self.pages}
        self._text = {page: Counter(_terms(page.text)) for page in self.pages}
        self.pages_with = Counter(
            term for page in self.pages for term in self._title[page] | self._words[page] | self._text[page].keys()
        )

    def score(self, term: str, page: Page) -> float:
        if term not in self.pages_with:
            return 0.0
        times = self._text[page][term]
        place = IN_HEAD * ((term in self._title[page]) + (term in self._words[page]))
        return (place + IN_TEXT * times / (1 + times)) * math.log(1 + len(self.pages) / self.pages_with[term])


_index = functools.cache(_Words)


def _terms(text: str) -> list[str]:
    """Returns the stems of a text's words, without common ones. A name such as num_workers counts as a whole, too."""
    words = re.findall(r"\w+", text.lower().replace("%", " percent "))
    parts = [part for word in words for part in {word, *word.split("_")} if part and part not in WITHOUT_MEANING]
    return [_stem(part) for part in parts]


def _stem(word: str) -> str:
    """Removes an ending, so that hang, hangs and hanging are one word."""
    for ending in ("ings", "ing", "ed", "es", "s", "e"):
        if word.endswith(ending) and len(word) - len(ending) >= 3 and not (ending == "s" and word.endswith("ss")):
            return word.removesuffix(ending)
    return word


def _known(term: str, known: Counter[str]) -> str:
    if term in known or not 3 < len(term) <= MAX_LETTERS:
        return term
    return next(iter(difflib.get_close_matches(term, known, 1, CLOSE)), term)
