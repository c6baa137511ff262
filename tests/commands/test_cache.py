"""``stoker cache``: the real command, on caches that are whole, damaged, or somebody else's."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stoker
from stoker.commands import main
from stoker.staging.store import folder, manage
from tests.helpers import flip

N = 40


def number(i: int) -> torch.Tensor:
    return torch.full((3, 16, 16), i, dtype=torch.int16)


class Place:
    """A folder of caches."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one cache, which is complete."""
    where = tmp_path_factory.mktemp("cache")
    staged = stoker.Staged(list(range(N)), prepare=number, cache="disk", cache_dir=where, cache_budget="1MB")
    for i in range(N):
        staged[i]
    return where


@pytest.fixture
def place(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A copy of it, to be spoilt."""
    shutil.copytree(built, tmp_path / "cache")
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    return Place(tmp_path / "cache")


@pytest.fixture
def stoker_cache(place: Place, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command in this process: exit code, stdout, stderr."""

    def run(*args: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main.main(["cache", *args])
        return code, *capsys.readouterr()

    return run


def only(place: Place) -> Path:
    (found,) = folder.caches(place.cache)
    return found


def test_ls(place: Place, stoker_cache: Any, tmp_path: Path) -> None:
    cache = only(place)
    code, out, _ = stoker_cache("ls")
    head, row, _, total = out.splitlines()
    assert code == 0
    assert head.split() == ["cache", "samples", "on", "disk", "used", "state"]
    assert row.split()[:2] == [cache.name, str(N)]
    assert row.endswith("complete")
    assert total.endswith(f"in {place.cache}")
    file = tmp_path / "out.json"
    assert stoker_cache("ls", "--json", str(file))[:2] == (0, out)
    found = json.loads(file.read_text())
    assert found["schema"] == 3
    assert found["dir"] == str(place.cache)
    used = sum(p.stat().st_blocks * 512 for p in (cache, *cache.iterdir()))
    assert found["caches"][0] | {"path": str(cache), "samples": N, "nbytes": used} == found["caches"][0]


def test_looking_is_no_use(place: Place, stoker_cache: Any) -> None:
    head = only(place) / "head.npy"
    os.utime(head, (1e9, 1e9))
    before = {p: p.stat().st_mtime_ns for p in [place.cache, only(place), *only(place).iterdir()]}
    assert stoker_cache("ls")[0] == 0
    assert head.stat().st_atime == 1e9
    assert {p: p.stat().st_mtime_ns for p in [place.cache, only(place), *only(place).iterdir()]} == before


def test_no_caches(place: Place, stoker_cache: Any, tmp_path: Path) -> None:
    assert stoker_cache("ls", "--dir", str(tmp_path / "none"))[:2] == (0, f"no caches in {tmp_path / 'none'}\n")
    assert not (tmp_path / "none").exists()
    code, _, err = stoker_cache("ls", "--dir", str(only(place) / "head.npy"))
    assert (code, "Not a directory" in err and "cannot list" in err) == (2, True)


def test_names(place: Place, stoker_cache: Any) -> None:
    cache = only(place)
    for word in ("0" * 16, "f" * 16):
        shutil.copytree(cache, place.cache / f"Other-{word}")
    code, out, err = stoker_cache("prune", "Nobody")
    assert (code, out) == (2, "")
    assert err == "stoker: no cache is named 'Nobody': stoker cache ls lists them\n"
    code, out, err = stoker_cache("prune", "Other")
    assert (code, out) == (2, "")
    assert err == f"stoker: 'Other' is ambiguous: Other-{'0' * 16}, Other-{'f' * 16}\n"
    assert stoker_cache("prune", "")[0] == 2
    assert len(manage.listed(place.cache)) == 3
    assert stoker_cache("prune", "Other-0", f"Other-{'0' * 16}")[1].count("freed") == 1
    assert len(manage.listed(place.cache)) == 2


class Trap:
    """Says that it was unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_what_else_lies_there(place: Place, stoker_cache: Any, tmp_path: Path) -> None:
    cache = only(place)
    trap = tmp_path / "unpickled"
    for name in ("web", "site-0123", "x y-0123456789abcdef", ".hidden-0123456789abcdef"):
        (place.cache / name).mkdir()
        (place.cache / name / "manifest.json").write_text("{}")  # as web pages have one
    (place.cache / "file-0123456789abcdef").write_text("")
    (place.cache / "link-0123456789abcdef").symlink_to("nowhere")
    (place.cache / "Empty-0123456789abcdef").mkdir()
    mine = place.cache / "Evil-0123456789abcdef"
    shutil.copytree(cache, mine)
    np.save(mine / "head.npy", np.array([Trap(str(trap))], object), allow_pickle=True)
    (mine / "words.npy").write_bytes(pickle.dumps(Trap(str(trap))))
    (mine / "manifest.json").write_text(
        json.dumps({"format": folder.FORMAT, "made": "\x1b[2J", "key": {"samples": 40, "arguments": "\x1b[2J"}})
    )
    os.mkfifo(mine / "fifo.npy")
    shutil.copytree(cache, place.cache / "Nested-0123456789abcdef")
    (place.cache / "Nested-0123456789abcdef" / "manifest.json").write_text("[" * 100_000)
    (place.cache / "Nested-0123456789abcdef" / "sources.json").write_text("[" * 100_000)
    held = sorted(p.name for p in place.cache.iterdir())
    assert [c.path.name for c in manage.listed(place.cache) if c.state == "damaged"] != []
    code, out, _ = stoker_cache("ls")
    assert code == 0
    assert [line.split()[-1] for line in out.splitlines()[1:4]].count("damaged") == 1
    assert "\x1b" not in out
    assert not trap.exists()
    assert sorted(p.name for p in place.cache.iterdir()) == held
    assert stoker_cache("prune", "--all")[0] == 0
    left = {n for n in held if not n.startswith(("Evil", "Nested", cache.name))}
    assert {p.name for p in place.cache.iterdir()} == left


def test_a_cache_that_is_not_complete(place: Place, stoker_cache: Any) -> None:
    only(place).rename(f"{only(place)}.part")
    assert stoker_cache("ls")[1].splitlines()[1].endswith("filling")
    (only(place) / "manifest.json").write_text("{")
    assert stoker_cache("ls")[1].splitlines()[1].endswith("damaged")


@pytest.mark.parametrize("seed", range(6))
def test_a_flipped_byte_anywhere_ends_no_command(place: Place, stoker_cache: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    print("seed", seed)
    for _ in range(4):
        path = rng.choice(sorted(p for p in only(place).iterdir() if p.stat().st_size))
        flip(path, int(rng.integers(min(path.stat().st_size, 4000))))
        assert stoker_cache("ls")[0] == 0


def test_prune(place: Place, stoker_cache: Any) -> None:
    cache = only(place)
    for k in range(4):
        shutil.copytree(cache, place.cache / f"Other{k}-{'0' * 16}")
    assert stoker_cache("prune")[0] == 2
    assert stoker_cache("prune", "Other0", "--all")[0] == 2
    assert stoker_cache("prune", "--older-than", "-1")[0] == 2
    code, out, _ = stoker_cache("prune", "Other0", "Other1")
    assert (code, out.count(" freed\n")) == (0, 2)
    assert len(manage.listed(place.cache)) == 3
    old = time.time() - 10 * 86_400
    os.utime(place.cache / f"Other2-{'0' * 16}" / "head.npy", (old, old))
    assert stoker_cache("prune", "--older-than", "11")[:2] == (0, f"nothing to remove in {place.cache}\n")
    assert stoker_cache("prune", "Other3", "--older-than", "9.5")[1] == f"nothing to remove in {place.cache}\n"
    assert "Other2" in stoker_cache("prune", "--older-than", "9.5")[1]
    assert len(manage.listed(place.cache)) == 2

    gone = place.cache / ".gone-x"  # of a removal that was killed
    gone.mkdir()
    (place.cache / f"Other3-{'0' * 16}").rename(gone / f"Other3-{'0' * 16}")
    (place.cache / ".gone-y").mkdir()
    (place.cache / ".gone-y" / "thesis").mkdir()
    assert " freed" in stoker_cache("prune", "--all")[1]
    assert [p.name for p in place.cache.iterdir()] == [".gone-y"]
