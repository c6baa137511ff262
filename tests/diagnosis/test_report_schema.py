"""docs/report.schema.json is what the types say, and docs/report.md names every key; a report keeps to both."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from benchmarks import pages
from stoker.diagnosis.report import prices, schema
from tests.commands.helpers import forked_stoker, script

DOCS = Path(__file__).parents[2] / "docs"


def test_the_schema_is_that_of_the_types() -> None:
    assert (DOCS / "report.schema.json").read_text() == pages.report_schema(), (
        "python -m benchmarks.pages writes it anew"
    )


def test_every_key_is_explained() -> None:
    text = (DOCS / "report.md").read_text()
    for struct in (
        schema.RunReport,
        schema.LoaderReport,
        schema.Finding,
        prices.Money,
        prices.MoreCores,
        prices.Saving,
    ):
        for field in msgspec.structs.fields(struct):
            assert f"`{field.encode_name}`" in text, f"{struct.__name__}.{field.encode_name}"


@pytest.mark.slow
def test_a_report_on_stdout_is_one_line_and_has_no_key_but_those_of_the_types(tmp_path: Path) -> None:
    body = "import sys\nfrom torch.utils.data import DataLoader\nfor b in DataLoader(list(range(50))): pass\nsys.stdout.write('no end')"
    p = forked_stoker(tmp_path, "--gpu-price", "2.10", "--json", "-", script(tmp_path, body))
    assert p.returncode == 0, p.stderr
    said, line = p.stdout.removesuffix("\n").rsplit("\n", 1)
    assert said == "no end"
    assert "report:" not in p.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    found = json.loads(line)
    assert found["money"]["prices"] == {"gpu": 2.1, "gpus": max(1, len(found["machine"]["gpus"])), "cpu": None}
    typed = msgspec.convert(found, schema.RunReport)
    assert typed.as_dict() == found
