"""What a trial's process may do."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from stoker.core.errors import UsageError
from stoker.staging.isolate import run_isolated


def test_a_folder_that_is_there_may_be_asked_for(tmp_path: Path) -> None:
    run_isolated(lambda: os.makedirs(tmp_path, exist_ok=True))
    with pytest.raises(UsageError, match="FileExistsError"):
        run_isolated(lambda: os.mkdir(tmp_path))


def test_a_folder_that_is_made_is_named_and_so_is_the_library(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    scope: dict[str, Any] = {}
    library = os.path.join(sysconfig.get_path("purelib"), "cachelib", "core.py")
    exec(compile("import os\ndef make(path): os.makedirs(path, exist_ok=True)", library, "exec"), scope)
    with pytest.raises(UsageError, match=f"makes a directory, '{folder}' .cachelib does: call it once"):
        run_isolated(lambda: scope["make"](folder))
    with pytest.raises(UsageError, match=f"makes a directory, '{folder}'$"):
        run_isolated(lambda: os.makedirs(folder))
    assert not folder.exists()
