"""The report as a piece of HTML in a notebook."""

from __future__ import annotations

import re
from html import unescape
from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest
import torch

import stoker
from stoker.diagnosis.report import inline
from stoker.diagnosis.report.headline import headline
from stoker.diagnosis.report.schema import Applied, Bypassing, Change, Compared, Finding, RunReport
from stoker.diagnosis.session import Session

from .helpers import entry


class Balanced(HTMLParser):
    """Raises where an end has no begin."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def checked(html: str) -> str:
    page = Balanced()
    page.feed(html)
    page.close()
    assert not page.open
    assert not re.search(r"https?:|<script|<link|<img", html), "it fetches nothing and runs nothing"
    return html


def report(**changes: Any) -> RunReport:
    return msgspec.structs.replace(RunReport(["watch()"], 0, 1.0, [entry()], "input-bound"), **changes)


def test_what_is_in_it() -> None:
    fix = "use num_workers=4 & <more>"
    findings = [Finding(f"cause_{i}", 0.5, {}, fix, 1.8, loader="train.py:3") for i in range(7)]
    html = checked(inline.render(report(findings=findings, diff="-a\n+b < c\n")))
    assert "train.py:3" in html
    assert "<b>cause_0</b>: costs 50% of the loop. use num_workers=4 &amp; &lt;more&gt;, predicted 1.80x" in html
    assert html.index("cause_3") < html.index("<summary>more") < html.index("cause_4")
    assert "+b &lt; c" in html
    assert len(html) < 10_000


def begins(html: str) -> str:
    """The text of the first line."""
    return unescape(re.sub("<[^>]*>", "", html.split("</div>")[0]))


def test_it_begins_with_the_headline() -> None:
    """The same sentence that a terminal and the page begin with; with --apply, the verdict is about what is left."""
    applied = Applied({}, Compared(False, Change(9.0, 6.0), []))
    bypassing = [Bypassing("a.py:<1>", "Own", "its class"), Bypassing("b.py:2", "Own", "its class")]
    for each in (report(), report(applied=applied), report(loaders=[]), report(loaders=[], bypassing=bypassing)):
        html = checked(inline.render(each))
        assert begins(html) == f"stoker: {headline(each)}"
    assert "1.5 times as fast: " in begins(inline.render(report(applied=applied)))
    assert "what is left: <b" in inline.render(report(applied=applied))
    assert html.count("stoker&#x27;s engine does not reach this loader") == 2


def test_nothing_to_show() -> None:
    assert "no DataLoader was iterated" in checked(inline.render(report(loaders=[])))
    bypassing = [Bypassing("a.py:<1>", "Own", "its class")]
    html = checked(inline.render(report(loaders=[], bypassing=bypassing)))
    assert "a.py:&lt;1&gt;: stoker's engine does not reach this loader" in html.replace("&#x27;", "'")


@pytest.mark.parametrize("verdict", ["healthy", "input-bound", "transfer-bound", "unknown"])
def test_each_verdict_has_a_colour(verdict: str) -> None:
    assert inline.COLOURS[verdict] in checked(inline.render(report(verdict=verdict)))


def test_a_session_has_it() -> None:
    with stoker.watch() as w:
        list(stoker.DataLoader(range(40), batch_size=4))
        assert w.live().startswith("stoker: ")
    assert "test_inline.py:" in checked(w._repr_html_())


def test_names_may_read_otherwise() -> None:
    with Session(lambda text: re.sub(r"[^\s\"]*test_inline.py:(\d+)", r"In[3]:<\1>", text)) as w:
        list(stoker.DataLoader(range(40), batch_size=4))
        list(torch.utils.data.DataLoader(range(40), batch_size=4))  # type: ignore[arg-type]
    assert "In[3]:&lt;" in checked(w._repr_html_())
    assert "In[3]:<" in str(w)
    assert w.report is not None
    assert "test_inline.py" not in str(w.report) + str(w) + w._repr_html_()
