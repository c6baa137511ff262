"""The report as a page: nothing of a script's is markup, nothing is fetched, and it draws in a browser."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stoker.commands import main
from stoker.diagnosis.report import html, plots
from stoker.diagnosis.report.schema import RunReport
from tests.commands.helpers import forked_stoker
from tests.diagnosis.helpers import fields

NASTY = "<script>alert(1)</script>/<b>\"'&amp;</title>"
BROWSER = next((b for b in ("chromium", "chromium-browser", "google-chrome") if shutil.which(b)), None)


def report(**changes: Any) -> RunReport:
    loader = fields(
        name=f"{NASTY}:3",
        looks=100,
        where=[{"kind": "transform", "name": NASTY, "line": f"{NASTY}:7", "ran": 0.9, "waited": 0.1}],
        by_epoch=[[50, 0.5, 0.5, 0.1], [50, 0.1, 0.5, 0.05]],
        epochs=2,
        decisions=[NASTY],
    )
    finding = {
        "cause": "slow_transform",
        "share": 0.5,
        "evidence": {"transform": NASTY, "samples": [NASTY], "stored_bytes": 1 << 30, "share_of_a_task": 0.5},
        "fix": NASTY,
        "predicted_speedup": 2.0,
    }
    found = {
        "schema": 2,
        "command": ["train.py", NASTY],
        "exit_code": 1,
        "machine": {"cores": 2, "memory": 1 << 34},
        "loaders": [loader],
        "verdict": "input-bound",
        "findings": [finding],
        "applied": {
            "settings": {NASTY: {"from": {"num_workers": 0}, "to": {"num_workers": 2}, "reason": NASTY}},
            "before": None,
            "compared": {
                "estimated": False,
                "script": {"before": 9.0, "after": 6.0},
                "loaders": [
                    {
                        "name": f"{NASTY}:3",
                        "first": {"before": 2.0, "after": 2.0},
                        "later": {"before": 2.0, "after": 1.0},
                        "samples_per_s": {"before": 90.0, "after": 150.0},
                        "each": {"before": [2.0, 2.0], "after": [2.0, 1.0]},
                    }
                ],
                "notes": [NASTY],
                "cost": {"trials_s": 0.1, "fill_s": 0.2},
            },
            "speedup": {},
        },
        "partial": True,
        "wall_s": 6.0,
        "bypassing": [{"name": NASTY, "class": NASTY, "reason": NASTY}],
        "diff": f"--- a/{NASTY}\n+++ b/x",
        **changes,
    }
    return msgspec.convert(found, RunReport)


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_what_a_script_is_called_is_no_markup() -> None:
    text = html.render(report())
    found = Elements(text)
    tags = [tag for tag, _ in found.seen]
    assert tags.count("script") == 0
    assert "b" in tags
    assert tags.count("title") == 1
    assert NASTY in found.text  # shown as it is
    assert tags.count("figure") == 5  # before and after, its epochs, epochs, a loop, a task
    assert "alert(1)" not in re.sub(r"&lt;script&gt;alert\(1\)", "", text)


def test_bars_are_as_long_as_what_they_show() -> None:
    drawn = [a for tag, a in Elements(html.render(report())).seen if tag == "i"]
    widths = {str(a["title"]): str(a["style"]) for a in drawn}
    assert widths["before: 9 s"].startswith("width:100.0%")
    assert widths["after: 6 s"].startswith("width:66.67%")


def test_it_begins_with_a_sentence_and_a_picture() -> None:
    text = Elements(html.render(report())).text
    assert "1.5 times as fast: train.py took 9.0 s and now takes 6.0 s" in text
    parts = ("times as fast", "Before and after", "Epochs", "Findings", "Evidence")
    places = [text.index(part, 500) for part in parts[1:]]
    assert places == sorted(places)
    observed = Elements(html.render(report(applied=None))).text
    assert "the loop waits for data" in observed
    assert "now and without slow_transform" in observed
    assert "predicted: " in observed


def test_a_prediction_is_drawn_to_the_scale_of_now() -> None:
    found = plots.picture(report(applied=None))
    assert found is not None
    now, then = (sum(part.value for part in parts) for _, parts in found.rows)
    assert now / then == pytest.approx(2.0)
    assert plots.picture(report(applied=None, loaders=[])) is None
    healthy = plots.picture(report(applied=None, findings=[]))
    assert healthy is not None
    assert len(healthy.rows) == 1


def test_one_diff_has_all_changes() -> None:
    findings = [
        {"cause": name, "fix": "x", "loader": "train.py:3", "diff": f"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-{name}\n+new\n"}
        for name in ("first", "second")
    ]
    whole = "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-first\n-second\n+new\n"
    text = html.render(report(findings=findings, diff=whole))
    assert text.count('<pre class="diff">') == 1
    assert Elements(text).text.count("--- a/x") == 1
    assert '<span class="cut">-second\n</span><span class="add">+new\n</span>' in text
    assert '<pre class="diff">' not in html.render(report(findings=findings[:1], diff=""))


def test_each_cell_of_a_table_has_its_column() -> None:
    """Where a narrow screen stacks the cells of a row, each begins with it."""
    text = html.render(report())
    cells = [a["data-label"] for tag, a in Elements(text).seen if tag == "td" and "data-label" in a]
    assert cells[:8] == ["loader", "workers", "batch", "batches", "epochs", "wait", "step", "samples/s"]
    assert text.count('<table class="stack">') + text.count('<table class="pairs">') == text.count("<table")


def test_only_the_users_own_lines_are_shown() -> None:
    files = [html.__file__, re.__file__, msgspec.__file__, "/other/venv/lib/python3.12/site-packages/PIL/Image.py"]
    where = [
        {"kind": "fetch", "name": f"f{i}", "line": f"{file}:7", "ran": 0.1, "waited": 0.0}
        for i, file in enumerate(files)
    ]
    where += [
        {"kind": "fetch", "name": "mine", "line": line, "ran": 0.1, "waited": 0.0} for line in ("train.py:8", "In[3]:5")
    ]
    found = Elements(html.render(report(loaders=[fields(name="train.py:3", looks=100, where=where)]))).text
    rows = re.findall(r"(?m)^(.+)(?:f\d|mine)fetch10\.0%", found)
    assert rows == ["train.py:8", "In[3]:5"]


def test_money_is_on_the_page() -> None:
    money = {
        "prices": {"gpu": 2.0, "gpus": 8},
        "waiting_share": 0.5,
        "waiting_per_day": 192.0,
        "savings": [{"cause": "slow_transform", "loader": "", "per_day": 96.0}],
    }
    text = " ".join(Elements(html.render(report(money=money))).text.split())
    assert "waiting for data costs 192.00 a day: 50% of 8 GPUs at 2.00 an hour" in text
    assert "saves 96.00 a day" in text


@pytest.mark.slow
def test_a_large_report_makes_a_small_page() -> None:
    where = [{"kind": "transform", "name": f"t{i}", "line": f"a.py:{i}", "ran": 0.01, "waited": 0.0} for i in range(12)]
    loaders = [
        fields(
            name=f"train.py:{i}",
            epochs=64,
            by_epoch=[[50, 0.5, 0.5, 0.1]] * 64,
            decisions=["more workers"] * 500,
            where=where,
            looks=100,
        )
        for i in range(100)
    ]
    assert len(html.render(report(loaders=loaders)).encode()) < 1 << 20


def test_nothing_is_fetched() -> None:
    for tag, attributes in Elements(html.render(report())).seen:
        assert not attributes.keys() & {"src", "href", "srcset", "action"}, tag


def test_a_run_without_loaders() -> None:
    text = html.render(
        report(loaders=[], bypassing=[], findings=[], applied=None, around={}, verdict="unknown", partial=False)
    )
    assert "The command failed before it iterated a DataLoader" in text


@pytest.mark.slow
def test_the_command_writes_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from torch.utils.data import DataLoader\nfor b in DataLoader(list(range(50)), num_workers=1): pass\n"
    )
    out = tmp_path / "a.html"
    p = forked_stoker(tmp_path, "--html", out, script)
    assert p.returncode == 0, p.stderr
    assert "train.py:2" in Elements(out.read_text()).text
    assert [f.name for f in tmp_path.iterdir() if f.name.startswith(".")] == []


def test_wrong_places(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    for place, why in (
        (tmp_path, "it is a directory"),
        (tmp_path / "no" / "a.html", f"directory {tmp_path}/no does not exist"),
    ):
        assert main.main(["run", "--html", str(place), str(script)]) == 2
        assert why in capfd.readouterr().err
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert main.main(["run", "--html", str(tmp_path / "a.html"), str(script)]) == 2
    assert "stoker[html]" in capfd.readouterr().err
    assert not (tmp_path / "ran").exists()


@pytest.mark.skipif(BROWSER is None, reason="no browser")
def test_it_draws_in_a_browser(tmp_path: Path) -> None:
    out = tmp_path / "a.html"
    html.save(report(), out)
    line = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom"]
    p = subprocess.run([*line, out.as_uri()], capture_output=True, text=True, timeout=120)
    found = Elements(p.stdout)
    assert sum(tag == "figure" for tag, _ in found.seen) == 5


MEASURE = """
<script>onload = () => document.title = [...document.querySelectorAll("iframe")].map(f => {
    const page = f.contentDocument, boxes = [...page.querySelectorAll(".scroll")]
    return [page.documentElement.scrollWidth <= f.clientWidth + 1, boxes.every(b => b.scrollWidth <= b.clientWidth + 1)]
}).join()</script>
"""


@pytest.mark.skipif(BROWSER is None, reason="no browser")
def test_no_width_is_too_small(tmp_path: Path) -> None:
    """Only diffs scroll sideways, each on its own; tables stack their cells."""
    page = html.render(report()).replace("&", "&amp;").replace('"', "&quot;")
    frames = "".join(f'<iframe width="{width}" height="900" srcdoc="{page}"></iframe>' for width in (390, 1200))
    (tmp_path / "a.html").write_text(f"<title></title>{frames}{MEASURE}")
    line = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom"]
    p = subprocess.run([*line, (tmp_path / "a.html").as_uri()], capture_output=True, text=True, timeout=120)
    assert "<title>true,true,true,true</title>" in p.stdout


@pytest.mark.skipif(BROWSER is None, reason="no browser")
def test_it_prints_on_two_pages(tmp_path: Path) -> None:
    where = [{"kind": "transform", "name": f"t{i}", "line": f"a.py:{i}", "ran": 0.01, "waited": 0.0} for i in range(6)]
    loaders = [
        fields(name=f"train.py:{i}", epochs=5, by_epoch=[[50, 0.5, 0.5, 0.1]] * 5, where=where, looks=100)
        for i in (1, 2)
    ]
    evidence = {f"number_{i}": i + 1 for i in range(4)}
    findings = [{"cause": f"cause_{i}", "share": 0.5, "evidence": evidence, "fix": "do this " * 20} for i in range(6)]
    diff = "--- a/x\n+++ b/x\n" + "".join(f"-old {i}\n+new {i}\n" for i in range(8))
    html.save(report(loaders=loaders, findings=findings, diff=diff, applied=None), tmp_path / "a.html")
    line = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--print-to-pdf={tmp_path / 'a.pdf'}"]
    subprocess.run([*line, (tmp_path / "a.html").as_uri()], capture_output=True, timeout=120, check=True)
    assert re.findall(rb"/Count (\d+)", (tmp_path / "a.pdf").read_bytes()) == [b"2"]
