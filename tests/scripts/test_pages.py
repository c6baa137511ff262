"""The diffs of docs/frameworks, put into the scripts that the pages show: each runs and is given the same samples."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from .harness import HERE, SOURCE, differences, run

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="stoker's own workers are on Linux"),
    pytest.mark.scripts,
    pytest.mark.timeout(600),
]
ROOT = HERE.parents[1]
DIFF = re.compile(r"```diff\n(.*?)```", re.DOTALL)
PAGES = [page for page in sorted((ROOT / "docs" / "frameworks").glob("*.md")) if DIFF.search(page.read_text())]


def patched(page: Path) -> tuple[str, str]:
    """The script that a page shows, and the same with the page's diff. A diff that only adds goes to the imports."""
    text = page.read_text()
    (name,) = re.findall(r'--8<-- "(tests/scripts/.*?)"', text)
    script = before = (ROOT / name).read_text()
    (diff,) = DIFF.findall(text)
    gone, new = ([line[1:] for line in diff.splitlines() if line[0] == sign] for sign in "-+")
    if gone:
        (line,) = gone
        imports = [x for x in new if x.startswith("import ") and not line.startswith(("import ", "from "))]
        script = script.replace(line, "\n".join(x for x in new if x not in imports))
        new = imports
    at = re.search(r"^import torch$", script, re.MULTILINE)
    assert at is not None
    return before, script if gone and not new else script[: at.start()] + "\n".join([*new, ""]) + script[at.start() :]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_diff_of_a_page(page: Path, tmp_path: Path, data: Path) -> None:
    paths = [SOURCE, HERE / "lib", HERE / "frameworks"]
    env = {
        "DATA": str(data),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
    }
    done = []
    for name, text in zip(("plain", "edited"), patched(page), strict=True):
        script = tmp_path / f"{name}.py"
        script.write_text(text)
        done.append(run("plain", [str(script)], tmp_path / name, env))
        assert done[-1].code == 0, done[-1].err
    assert "stoker" in (tmp_path / "edited.py").read_text()
    assert done[1].of("") == done[0].of(""), differences(done[1], done[0])
    assert done[1].left == []
