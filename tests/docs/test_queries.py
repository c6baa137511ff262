"""What people ask finds its page: each question of queries.txt, among the first three answers of ``stoker explain``."""

from __future__ import annotations

from pathlib import Path

from stoker.commands.explain import MOST
from stoker.diagnosis import pages
from stoker.diagnosis.search import find

LINES = (Path(__file__).parent / "queries.txt").read_text().splitlines()
ASKED = {question: wanted.split(" or ") for question, _, wanted in (x.partition(" | ") for x in LINES if x[0] != "#")}


def test_a_question_finds_its_page_among_the_first_three() -> None:
    found = {question: [page.name for page in find(question)[:MOST]] for question in ASKED}
    missed = {q: names for q, names in found.items() if not {*ASKED[q]} & {*names}}
    assert missed == {}
    first = [names[0] in ASKED[question] for question, names in found.items()]
    assert sum(first) >= 0.8 * len(first), [q for q, names in found.items() if names[0] not in ASKED[q]]


def test_the_questions_are_many_and_about_pages_that_are_there() -> None:
    known = {page.name for page in (*pages.symptoms(), *pages.guides())}
    wanted = {name for names in ASKED.values() for name in names}
    assert len(ASKED) >= 50
    assert wanted <= known
    assert {page.name for page in pages.symptoms()} <= wanted
