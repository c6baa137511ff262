"""Every example runs as a user would run it, within a time limit."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from PIL import Image

from tests.commands.helpers import python

EXAMPLES = Path(__file__).parent.parent / "examples"
LIMIT_S = 120  # a hang, not slowness, is what this is to catch; each takes a few seconds
ONE_IDEA = 60  # lines; make_photos.py makes the input of the others and may be longer


def run(name: str, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / name), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def forked(name: str, *args: object) -> subprocess.CompletedProcess[str]:
    return python(EXAMPLES / name, *args)


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("photos") / "data"
    done = run("make_photos.py", "--out", out, "--count", 20)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.slow
def test_photos_are_what_the_csv_says(photos: Path) -> None:
    with open(photos / "labels.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["path"] for row in rows] == [f"photos/{i:05d}.jpg" for i in range(20)]
    assert {int(row["label"]) for row in rows} <= set(range(17))
    for row in rows:
        with Image.open(photos / row["path"]) as image:
            assert (image.format, image.size, image.mode) == ("JPEG", (512, 384), "RGB")
    assert sorted(path.name for path in photos.iterdir()) == ["complete.json", "labels.csv", "photos"]
    assert [path.name for path in photos.parent.iterdir()] == ["data"]


@pytest.mark.slow
def test_photos_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    for processes in (1, 2):
        done = run("make_photos.py", "--out", tmp_path / str(processes), "--count", 42, "--processes", processes)
        assert done.returncode == 0, done.stderr
    assert len(digests(tmp_path / "1")) == 44
    assert digests(tmp_path / "1") == digests(tmp_path / "2")


@pytest.mark.slow
def test_another_seed_gives_other_photos_and_keeps_what_is_not_ours(tmp_path: Path) -> None:
    out = tmp_path / "data"
    assert run("make_photos.py", "--out", out, "--count", 12).returncode == 0
    first = digests(out)
    (out / "stoker-report.json").write_text("{}")
    assert run("make_photos.py", "--out", out, "--count", 12, "--seed", 1).returncode == 0
    assert (out / "stoker-report.json").read_text() == "{}"
    assert digests(out)["photos/00000.jpg"] != first["photos/00000.jpg"]
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.slow
def test_photos_that_are_there_are_kept(photos: Path) -> None:
    before = (photos / "photos/00000.jpg").stat()
    done = run("make_photos.py", "--out", photos, "--count", 20)
    assert (done.returncode, "there already" in done.stderr) == (0, True)
    after = (photos / "photos/00000.jpg").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_folder_of_somebody_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years")
    done = run("make_photos.py", "--out", tmp_path, "--count", 3)
    assert done.returncode == 1
    assert "name another --out" in done.stderr
    assert "Traceback" not in done.stderr
    assert digests(tmp_path).keys() == {"thesis.txt"}


@pytest.mark.few(1)
@pytest.mark.parametrize("args", [("--count", "0"), ("--count", "many"), ("--nonsense",)])
def test_photos_wrong_arguments(args: tuple[str, ...], tmp_path: Path) -> None:
    done = run("make_photos.py", "--out", tmp_path / "data", *args)
    assert done.returncode == 2
    assert "usage:" in done.stderr
    assert not (tmp_path / "data").exists()


def test_photos_without_the_packages_names_the_extra(tmp_path: Path) -> None:
    hide = (
        "import importlib.util as u, runpy, sys; real = u.find_spec;"
        "u.find_spec = lambda name, *rest: None if name == 'skimage' else real(name, *rest);"
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", hide, str(EXAMPLES / "make_photos.py"), "--out", str(tmp_path / "data")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 1
    assert "scikit-image not installed" in done.stderr
    assert "stoker[demo]" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_photos_interrupted_leave_nothing(number: int, code: int, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "make_photos.py"), "--out", str(tmp_path / "data"), "--count", "100000"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + LIMIT_S
    while not any(tmp_path.glob(".data.making-*/photos/*.jpg")):  # it works
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pool = psutil.Process(process.pid).children(recursive=True)
    assert pool
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == code
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []
    assert psutil.wait_procs(pool, timeout=LIMIT_S)[1] == []


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.slow
def test_photos_killed_are_cleared_away_by_the_next_run(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "make_photos.py"), "--out", str(tmp_path / "data"), "--count", "100000"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + LIMIT_S
    while not any(tmp_path.glob(".data.making-*/photos/*.jpg")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pool = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert psutil.wait_procs(pool, timeout=LIMIT_S)[1] == []
    assert run("make_photos.py", "--out", tmp_path / "data", "--count", 3).returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.slow
def test_train_lazy(photos: Path) -> None:
    done = forked("train_lazy.py", "--data", photos, "--epochs", 1)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("epoch 1: loss ")


def test_train_lazy_without_photos_says_what_to_do(tmp_path: Path) -> None:
    done = forked("train_lazy.py", "--data", tmp_path / "data")
    assert done.returncode == 2
    assert "python examples/make_photos.py" in done.stderr
    assert "Traceback" not in done.stderr


def test_train_lazy_is_no_stoker_script() -> None:
    text = (EXAMPLES / "train_lazy.py").read_text()
    assert "stoker" not in text
    assert "torchvision" not in text


@pytest.mark.slow
def test_dataloader() -> None:
    done = forked("dataloader.py")
    assert done.returncode == 0, done.stderr
    assert "the same batches: True" in done.stdout


@pytest.mark.slow
def test_auto_workers_says_a_count_and_one_more_core_changes_no_batch() -> None:
    done = forked("auto_workers.py")
    assert done.returncode == 0, done.stderr
    assert "epoch 2: " in done.stdout
    if not hasattr(os, "sched_setaffinity"):
        return
    granted = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(granted)})
    try:
        alone = forked("auto_workers.py")
    finally:
        os.sched_setaffinity(0, granted)
    batches = [[line.partition("batches ")[2] for line in text.splitlines()] for text in (done.stdout, alone.stdout)]
    assert batches[0] == batches[1]


@pytest.mark.slow
def test_installed() -> None:
    done = forked("installed.py")
    assert done.returncode == 0, done.stderr
    assert "engine of torch:" in done.stdout
    if sys.platform == "linux":
        assert "engine of stoker:" in done.stdout
    assert "the same weights: True" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="stoker's own workers are on Linux")
@pytest.mark.parametrize(
    ("name", "word"), [("resize.py", "batches "), ("threads.py", "sum "), ("share_list.py", "labels 900000")]
)
def test_both_ways_give_the_same(name: str, word: str) -> None:
    done = forked(name)
    assert done.returncode == 0, done.stderr
    ends = [line.partition(word)[2] for line in done.stdout.splitlines() if word in line]
    assert ends
    assert len(set(ends)) == 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="stoker's own workers are on Linux")
def test_a_run_that_is_killed_twice_ends_as_one_that_is_not(tmp_path: Path) -> None:
    whole = forked("resume.py", "--checkpoint", tmp_path / "whole.pt")
    assert whole.stdout.startswith("weight "), whole.stderr
    file = tmp_path / "killed.pt"
    for more, code in ((("--die-after", 15), 1), (("--workers", 1, "--die-after", 9), 1), (("--workers", 0), 0)):
        done = forked("resume.py", "--checkpoint", file, *more)
        assert done.returncode == code, done.stderr
    assert done.stdout == whole.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="stoker's own workers are on Linux")
@pytest.mark.slow
def test_tuning() -> None:
    done = forked("tune.py")
    assert done.returncode == 0, done.stderr
    assert "<- the knee" in done.stdout
    assert "to paste" in done.stdout


# Trainings as people write them, and how many samples show what --apply does to each.
TRAININGS = {"images": 60, "segmentation": 40, "text": 200, "audio": 80, "tables": 800}


@pytest.mark.skipif(sys.platform != "linux", reason="stoker run is for Linux")
@pytest.mark.slow
@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_learns_the_same_and_decodes_once(name: str, tmp_path: Path) -> None:
    script = [EXAMPLES / name / "train.py", "--data", tmp_path / "data", "--count", TRAININGS[name], "--epochs", 3]
    line = [sys.executable, *map(str, script)]
    plain = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    line[1:1] = ["-m", "stoker", "run", "--apply", "--json", str(tmp_path / "report.json")]
    applied = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    entries = json.loads((tmp_path / "report.json").read_text())["applied"]["settings"].values()
    assert all(entry["cache"]["filled"] == entry["cache"]["samples"] for entry in entries), entries
    assert applied.stdout == plain.stdout


def test_each_example_is_run_here_and_short() -> None:
    assert {path.parent.name for path in EXAMPLES.glob("*/train.py")} == TRAININGS.keys()
    assert all(f"({name}/train.py)" in (EXAMPLES / "README.md").read_text() for name in TRAININGS)
    names = {path.name for path in EXAMPLES.glob("*.py")}
    text = Path(__file__).read_text()
    assert [name for name in names if f'"{name}"' not in text] == []
    long = [name for name in names if len((EXAMPLES / name).read_text().splitlines()) >= ONE_IDEA]
    assert long == ["make_photos.py"]
