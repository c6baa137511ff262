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
from stoker.diagnosis.report import html
from stoker.diagnosis.report.schema import RunReport
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
        over_time=[[1.0, 0.5, 300.0], [2.0, 0.1, 800.0]],
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
    assert tags.count("h3") == 5  # a loop, a task, time, epochs, and epochs before and after
    assert "alert(1)" not in re.sub(r"&lt;script&gt;alert\(1\)", "", text)


def test_bars_are_as_long_as_what_they_show() -> None:
    drawn = [a for tag, a in Elements(html.render(report())).seen if tag == "i"]
    widths = {str(a["title"]): str(a["style"]) for a in drawn}
    assert widths["before: 2 s"].startswith("width:100.0%")
    assert widths["after: 1 s"].startswith("width:50.0%")
    assert widths["1.0 s: waiting 50 %, 300 samples/s"] == "height:50.0%"


def test_nothing_is_fetched() -> None:
    for tag, attributes in Elements(html.render(report())).seen:
        assert not attributes.keys() & {"src", "href", "srcset", "action"}, tag


def test_a_run_without_loaders() -> None:
    text = html.render(
        report(loaders=[], bypassing=[], findings=[], applied=None, around={}, verdict="unknown", partial=False)
    )
    assert "no DataLoader was iterated" in text


@pytest.mark.slow
def test_the_command_writes_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from torch.utils.data import DataLoader\nfor b in DataLoader(list(range(50)), num_workers=1): pass\n"
    )
    out = tmp_path / "a.html"
    line = [sys.executable, "-m", "stoker", "run", "--html", str(out), str(script)]
    p = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert p.returncode == 0, p.stderr
    assert "train.py:2" in Elements(out.read_text()).text
    assert [f.name for f in tmp_path.iterdir() if f.name.startswith(".")] == []


def test_wrong_places(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    for place, why in ((tmp_path, "it is a folder"), (tmp_path / "no" / "a.html", f"there is no folder {tmp_path}/no")):
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
    assert sum(tag == "div" and a.get("class") in ("plot", "time") for tag, a in found.seen) == 5
