"""What is built for PyPI: a source archive, the wheel made from it, and that wheel in an environment of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

import stoker

ROOT = Path(__file__).parent.parent
BUILT = ("src", "pyproject.toml", "README.md", "LICENSE")  # what a checkout gives to the build


def call(*line: object, cwd: Path) -> str:
    """What a command prints. No PYTHONPATH: it would bring this checkout in."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    p = subprocess.run([*map(str, line)], cwd=cwd, env=env, capture_output=True, text=True, timeout=180)
    assert p.returncode == 0, p.stderr[-2000:]
    return p.stdout


def build(what: str, folder: Path, out: Path) -> Path:
    """The archive that setuptools makes of a folder; ``what`` is "sdist" or "wheel"."""
    code = f"import setuptools.build_meta as b, sys; b.build_{what}(sys.argv[1])"
    call(sys.executable, "-c", code, out, cwd=folder)
    (found,) = out.glob("*.tar.gz" if what == "sdist" else "*.whl")
    return found


@pytest.mark.slow
def test_the_wheel_is_complete(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in BUILT:
        source = ROOT / name
        ignored = shutil.ignore_patterns("*.egg-info", "__pycache__")
        shutil.copytree(source, checkout / name, ignore=ignored) if source.is_dir() else shutil.copy(source, checkout)
    with tarfile.open(build("sdist", checkout, tmp_path)) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    wheel = build("wheel", unpacked, tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith("/METADATA"))
    source = {path.relative_to(checkout / "src") for path in (checkout / "src").rglob("*") if path.is_file()}
    assert {path.as_posix() for path in source if ".egg-info" not in path.parts[0]} <= names
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert "License-Expression: Apache-2.0" in metadata

    # An environment with nothing but the wheel, and what it depends on from the one that runs the tests.
    call(sys.executable, "-m", "venv", "--without-pip", "clean", cwd=tmp_path)
    python, command = (tmp_path / "clean" / "bin" / name for name in ("python", "stoker"))
    site = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    (site / "others.pth").write_text(str(Path(torch.__file__).parent.parent))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "install"]
    call(*pip, "--no-index", "--no-deps", "--force-reinstall", wheel, cwd=tmp_path)
    assert Path(call(python, "-c", "import stoker; print(stoker.__file__)", cwd=tmp_path).strip()).is_relative_to(site)
    assert call(command, "--version", cwd=tmp_path).strip() == f"stoker {stoker.__version__}"
    script = tmp_path / "train.py"
    script.write_text("from torch.utils.data import DataLoader\nfor b in DataLoader(list(range(50))): pass\n")
    call(command, "run", "--html", "report.html", script, cwd=tmp_path)
    assert "train.py:2" in (tmp_path / "report.html").read_text()
