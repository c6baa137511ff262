"""What is built for PyPI: a source archive, the wheel made from it, and that wheel in an environment of its own."""

from __future__ import annotations

import json
import os
import re
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
BUILT = (
    "src",
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
    "MANIFEST.in",
    "LICENSE",
)  # what a checkout gives to the build
SCRIPT = "from torch.utils.data import DataLoader\nfor b in DataLoader(list(range(50))): pass\n"


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


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is built from, with a test beside it, which is not for users."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in BUILT:
        source = ROOT / name
        ignored = shutil.ignore_patterns("*.egg-info", "__pycache__")
        shutil.copytree(source, folder / name, ignore=ignored) if source.is_dir() else shutil.copy(source, folder)
    (folder / "tests").mkdir()
    (folder / "tests" / "test_it.py").touch()
    return folder


@pytest.fixture(scope="module")
def source_archive(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", checkout, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(source_archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made from the source archive, as a user's pip would."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(source_archive) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # before Python 3.11.4 there is none
        archive.extractall(unpacked)
    (folder,) = unpacked.iterdir()
    return build("wheel", folder, tmp_path_factory.mktemp("wheel"))


def sources(checkout: Path) -> set[str]:
    found = (path.relative_to(checkout / "src") for path in (checkout / "src").rglob("*") if path.is_file())
    return {path.as_posix() for path in found if ".egg-info" not in path.parts[0]}


@pytest.mark.slow
def test_the_wheel_has_the_sources_and_nothing_else(checkout: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        about = {name.rpartition(".dist-info/")[2]: name for name in archive.namelist() if ".dist-info/" in name}
        metadata = archive.read(about["METADATA"]).decode()
    assert names == sources(checkout)
    assert about.keys() == {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}
    assert wheel.name == f"stoker-{stoker.__version__}-py3-none-any.whl"
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.10" in metadata


@pytest.mark.slow
def test_the_source_archive_has_what_it_is_built_from_and_nothing_else(checkout: Path, source_archive: Path) -> None:
    with tarfile.open(source_archive) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
    made = {"PKG-INFO", "setup.cfg"}
    there = {name for name in names - made if ".egg-info/" not in name}
    assert there == {*BUILT, *(f"src/{name}" for name in sources(checkout))} - {"src"}


@pytest.mark.slow
def test_it_runs_in_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    """Nothing is there but it, and what it depends on from the environment that runs the tests."""
    call(sys.executable, "-m", "venv", "--without-pip", "clean", cwd=tmp_path)
    python, command = (tmp_path / "clean" / "bin" / name for name in ("python", "stoker"))
    site = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    (site / "others.pth").write_text(str(Path(torch.__file__).parent.parent))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "install"]
    call(*pip, "--no-index", "--no-deps", "--no-build-isolation", "--force-reinstall", wheel, cwd=tmp_path)
    assert Path(call(python, "-c", "import stoker; print(stoker.__file__)", cwd=tmp_path).strip()).is_relative_to(site)
    assert call(command, "--version", cwd=tmp_path).strip() == f"stoker {stoker.__version__}"
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    call(command, "run", "--html", "report.html", script, cwd=tmp_path)
    assert "train.py:2" in (tmp_path / "report.html").read_text()


def test_one_version_everywhere() -> None:
    assert f'version = "{stoker.__version__}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.slow
def test_the_bill_of_materials_has_what_the_wheel_depends_on() -> None:
    line = [sys.executable, str(ROOT / "release" / "sbom.py")]
    out = subprocess.run(line, capture_output=True, text=True, check=True, timeout=60).stdout
    found = json.loads(out)
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.6")
    assert found["metadata"]["component"]["purl"] == f"pkg:pypi/stoker@{stoker.__version__}"
    names = {each["name"].lower() for each in found["components"]}
    declared = re.search(r"(?m)^dependencies = \[(.*)\]", (ROOT / "pyproject.toml").read_text())
    assert declared is not None
    assert {re.split(r"[<>=]", name)[0] for name in re.findall(r'"(.*?)"', declared[1])} <= names
    assert "sympy" in names  # of torch
    assert not names & {"pytest", "stoker"}
    references = {each["bom-ref"] for each in found["components"]} | {found["metadata"]["component"]["bom-ref"]}
    assert {each["ref"] for each in found["dependencies"]} == references
    assert {other for each in found["dependencies"] for other in each["dependsOn"]} <= references
