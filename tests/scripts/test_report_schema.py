"""Reports of real runs keep to docs/report.schema.json, as a validator that is not ours reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands.helpers import TRAIN, report, script, stoker

pytestmark = pytest.mark.scripts
SCHEMA = Path(__file__).parents[2] / "docs" / "report.schema.json"


@pytest.mark.parametrize("options", [[], ["--apply"], ["--gpu-price", "2.10", "--cpu-price", "0.04"]], ids=str)
def test_real_reports(options: list[str], tmp_path: Path) -> None:
    import jsonschema

    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    p = stoker(tmp_path, *options, script(tmp_path, TRAIN, nap=0.004))
    assert p.returncode == 0, p.stderr
    found = report(tmp_path)
    validator.validate(found)
    for wrong in ({**found, "verdict": 1}, {**found, "loaders": [{"batches": "1"}]}, {**found, "schema": None}):
        assert not validator.is_valid(wrong)
