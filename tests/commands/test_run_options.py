"""Options of ``stoker run`` that are refused before the script runs."""

from __future__ import annotations

import pytest

from stoker.commands.main import main


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--workers-on", "ray"], "needs --apply"),
        (["--apply", "--workers-on", "dask"], "ray, or ray:HOST:PORT"),
        (["--apply", "--workers-on", "ray:ray://head:10001"], "ray, or ray:HOST:PORT"),
    ],
)
def test_where_workers_are(options, reason, tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('the script ran')")
    assert main(["run", *options, str(script)]) == 2
    assert reason in capsys.readouterr().err
