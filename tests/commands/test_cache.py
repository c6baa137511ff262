"""``stoker cache``: the real command, on caches that are whole, begun, damaged, or somebody else's."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.commands import cache as cache_command
from stoker.commands import main
from stoker.core.terminal import human_bytes
from stoker.staging.store import folder, manage
from stoker.staging.store.head import Head
from tests.helpers import flip, interrupt

N = 40
COMPARED = 2  # samples made anew where a cache is opened: once by the target itself, and once by the command
# ``prepare`` notes what it makes; where there is a file "stuck" it never ends with sample 30.
SCRIPT = """
    import os, random, threading, torch, stoker
    from pathlib import Path
    from cache_cli_pairs import Pair
    from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

    HERE = os.path.dirname(os.path.abspath(__file__))
    FILES = sorted(map(str, Path(HERE, "source").iterdir()))

    def note(words):
        with open(HERE + "/made", "a") as file:
            file.write(words + "\\n")

    def prepare(path):
        number = int(Path(path).read_text())
        if number == 30 and os.path.exists(HERE + "/stuck"):
            os.write(1, b"reading\\n")
            threading.Event().wait()
        note(path)
        return Pair(torch.full((3, 16, 16), number, dtype=torch.int16), number)

    def draws(path):
        return torch.zeros(9) + random.random()

    class Photos(Dataset):
        transform = [torch.Tensor.float, torch.rand_like]
        def __init__(self, n=40): self.files = FILES[:n]
        def __len__(self): return len(self.files)
        def __getitem__(self, i):
            x = torch.full((5,), int(Path(self.files[i]).read_text()))
            for t in self.transform:
                x = t(x)
            return x, i

    class Broken(Dataset):
        def __len__(self): return 40
        def __getitem__(self, i):
            if i in (3, 17):
                raise OSError(5, "bad disk", f"/data/{i}.jpg")
            return torch.full((5,), i)

    class Odd(Dataset):
        def __len__(self): return 40
        def __getitem__(self, i): return random.random()

    class Stream(IterableDataset):
        def __iter__(self): return iter(range(3))

    def staged(**settings): return stoker.Staged(FILES, prepare=prepare, cache_key="mine", **settings)
    def loader(): return DataLoader(Photos(30), batch_size=7, shuffle=True)
    def some(): return stoker.DataLoader(Subset(Subset(staged(), range(0, 40, 2)), [-1, 3, 4, 4]), 2)
    def on_disk(): return staged(cache="disk", cache_dir=HERE + "/mine", cache_budget=10_000_000)
    def memory(): return staged(cache="ram")
    def random_(): return stoker.Staged(FILES, prepare=draws)
    photos, broken, odd, stream, five = Photos(), Broken(), Odd(), Stream(), 5

    if __name__ == "__main__":
        data = staged(cache="disk")
        print(data.account.filled, sum(n for _, n in stoker.DataLoader(data, None, num_workers=0)))
"""


class Place:
    """A folder with a target, its source files and its caches; commands in it."""

    def __init__(self, path: Path) -> None:
        self.path, self.cache = path, path / "cache"
        self.module = f"target_{path.name.replace('-', '_')}"
        self.script = path / f"{self.module}.py"
        (path / "source").mkdir()
        for i in range(N):
            (path / "source" / f"{i:02}.txt").write_text(str(i))
        self.script.write_text(textwrap.dedent(SCRIPT))
        (path / "cache_cli_pairs.py").write_text(
            "import collections; Pair = collections.namedtuple('Pair', 'image number')"
        )

    def run(self, *args: str, python: tuple[str, ...] = ("-m", "stoker", "cache")) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *python, *args], capture_output=True, text=True, timeout=60, cwd=self.path, env=self.env
        )

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "STOKER_CACHE": str(self.cache)}

    def target(self, name: str) -> str:
        return f"{self.script}:{name}"

    @property
    def made(self) -> int:
        """Samples prepared so far."""
        there = self.path / "made"
        return there.read_text().count("\n") if there.exists() else 0


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A place with a cache of ``staged`` whose making was interrupted."""
    place = Place(tmp_path_factory.mktemp("cache_cli"))
    (place.path / "stuck").touch()
    line = ("cache", "build", place.target("staged"), "--workers", "2", "--budget", "1MB")
    out, said = interrupt(*line, env=place.env)
    assert out == ""
    assert "rerun to continue" in said[-2]
    (place.path / "stuck").unlink()
    return place


@pytest.fixture(scope="module")
def built(begun: Place) -> Place:
    """The same when the next command went on with it."""
    before = begun.made
    (part,) = folder.caches(begun.cache)
    filled = manage.look(part).filled
    assert manage.look(part).state == "filling"
    assert 5 <= filled < N
    assert manage.look(part).budget == 1_000_000  # else every copy of it would write the hole that its heap is
    p = begun.run("build", begun.target("staged"), "--workers", "2", "--budget", "1MB", "--json", "-")
    assert (p.returncode, p.stderr) == (0, "")
    found = json.loads(p.stdout)
    assert (found["samples"], found["filled"], found["added"], found["failed"]) == (N, N, N - filled, [])
    assert found["path"] == str(part.with_suffix(""))
    assert begun.made - before <= N - filled + COMPARED
    return begun


@pytest.fixture
def place(built: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A copy of that cache, to be spoilt; commands in this process find it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    cache = built.cache
    built.cache = tmp_path / "cache"
    shutil.copytree(cache, built.cache)
    monkeypatch.setenv("STOKER_CACHE", str(built.cache))
    monkeypatch.chdir(built.path)
    yield built
    built.cache = cache
    sys.modules.pop(built.module, None)


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


# -- build


@pytest.mark.slow
def test_a_run_finds_what_was_built(place: Place) -> None:
    before = place.made
    p = place.run(python=(str(place.script),))
    assert p.stdout == f"{N} {sum(range(N))}\n", p.stderr
    assert place.made - before <= COMPARED


def test_what_a_target_may_be(place: Place, stoker_cache: Any, tmp_path: Path) -> None:
    wants = {"photos": N, "loader": 30, "some": 4, "memory": N, "on_disk": N}
    for k, (name, samples) in enumerate(wants.items()):
        where = [] if name == "on_disk" else ["--dir", str(tmp_path / str(k))]
        code, out, err = stoker_cache("build", place.target(name), "--workers", "0", *where)
        count = 3 if name == "some" else samples  # one of them is named twice
        assert code == 0, err
        assert out.startswith(f"{count} of {count} samples cached, "), out
        base = tmp_path / str(k) if where else place.path / "mine"
        (cache,) = manage.listed(base)
        assert out.endswith(f": {cache.path}\n")
        assert cache.filled == count
        assert cache.state == ("filling" if name == "some" else "complete")
        assert err == ""
        if name == "some":
            _, out, err = stoker_cache("build", place.target("some"), "--workers", "0", *where, "--budget", "1MB")
            assert "nothing to do" in out
            assert f"stoker: it was begun with a budget of {cache.budget:,} bytes and keeps that" in err
    shutil.rmtree(place.path / "mine")
    code, out, _ = stoker_cache("build", place.target("staged"), "--workers", "0")
    assert code == 0
    assert "nothing to do" in out


def test_samples_that_raise_are_listed_and_the_others_go_on(place: Place, stoker_cache: Any) -> None:
    for workers in ("0", "2"):
        code, out, _ = stoker_cache("build", place.target("broken"), "--workers", workers)
        assert code == 1
        lines = out.splitlines()
        assert lines[0] == "2 samples failed"
        assert lines[1:3] == [f"  {i}: OSError: [Errno 5] bad disk: '/data/{i}.jpg'" for i in (3, 17)]
        assert lines[3].startswith("38 of 40 samples cached")


def test_what_is_not_kept_is_said(place: Place, stoker_cache: Any) -> None:
    code, out, err = stoker_cache("build", place.target("random_"), "--workers", "0")
    assert code == 1
    assert "draw random numbers" in err
    assert out.startswith("0 of 40 samples cached")
    assert "refused" in stoker_cache("ls")[1]
    code, out, _ = stoker_cache("verify", "paths")  # which is two
    assert code == 2
    code, out, err = stoker_cache("build", place.target("photos"), "--budget", "1KB", "--workers", "0")
    assert code == 1
    assert "the budget of 1,000 bytes" in err
    code, out, err = stoker_cache("build", place.target("photos"), "--dir", str(place.script), "--workers", "0")
    assert (code, out) == (1, "")
    assert "There is no cache in" in err


def test_wrong_targets(place: Place, stoker_cache: Any) -> None:
    wrong = {
        ("nowhere.py:data",): "there is no file nowhere.py",
        (place.target("nothing"),): "has no 'nothing'",
        (place.target("five"),): "neither a Dataset nor a DataLoader",
        (place.target("stream"),): "staging wants a map-style dataset",
        (place.target("odd"),): "cannot be split",
        (place.target("photos"), "--budget", "lots"): "budget='lots'",
        (place.target("photos"), "--json", "no/file.json"): "cannot be written",
    }
    for args, words in wrong.items():
        code, out, err = stoker_cache("build", *args)
        assert (code, out) == (2, ""), args
        assert words in err
        assert err.count("\n") == 1
    for args in (("build",), ("build", "x", "--workers", "few"), ("prune", "--older-than", "-1"), ()):
        assert stoker_cache(*args)[0] == 2


# -- ls


def test_ls(place: Place, stoker_cache: Any, tmp_path: Path) -> None:
    cache = only(place)
    code, out, _ = stoker_cache("ls")
    head, row, _, total = out.splitlines()
    assert code == 0
    assert head.split() == ["cache", "samples", "in", "on", "disk", "made", "state"]
    assert row.split()[:3] == [cache.name[:12], str(N), "100%"]
    assert row.endswith("complete")
    assert total.endswith(f"in {place.cache}")
    file = tmp_path / "out.json"
    assert stoker_cache("ls", "--json", str(file))[:2] == (0, out)
    found = json.loads(file.read_text())
    assert found["schema"] == 1
    assert found["dir"] == str(place.cache)
    used = sum(p.stat().st_blocks * 512 for p in cache.iterdir())
    assert found["caches"][0] | {"name": cache.name, "path": str(cache), "nbytes": used} == found["caches"][0]


def test_looking_is_no_use(place: Place, stoker_cache: Any) -> None:
    head = only(place) / "head.npy"
    os.utime(head, (1e9, 1e9))
    before = {p: p.stat().st_mtime_ns for p in [place.cache, only(place), *only(place).iterdir()]}
    assert stoker_cache("ls")[0] == 0
    assert head.stat().st_atime == 1e9
    assert {p: p.stat().st_mtime_ns for p in [place.cache, only(place), *only(place).iterdir()]} == before


def test_no_caches(place: Place, stoker_cache: Any, tmp_path: Path) -> None:
    for command in ("ls", "verify"):
        assert stoker_cache(command, "--dir", str(tmp_path / "none"))[:2] == (0, f"no caches in {tmp_path / 'none'}\n")
    assert not (tmp_path / "none").exists()
    code, _, err = stoker_cache("ls", "--dir", str(place.script))
    assert (code, "cannot be listed: Not a directory" in err) == (2, True)


def test_names(place: Place, stoker_cache: Any) -> None:
    cache = only(place)
    for word in ("0" * 16, "f" * 16):
        shutil.copytree(cache, place.cache / f"Other-{word}")
    for command in ("verify", "prune"):
        code, out, err = stoker_cache(command, "Nobody")
        assert (code, out) == (2, "")
        assert f"there is no cache 'Nobody' in {place.cache}; it has Other-{'0' * 16}, Other-{'f' * 16} or " in err
        code, out, err = stoker_cache(command, "Other")
        assert (code, out) == (2, "")
        assert err == f"stoker: 'Other' may be Other-{'0' * 16} or Other-{'f' * 16}\n"
        assert stoker_cache(command, "")[0] == 2
    assert len(manage.listed(place.cache)) == 3
    assert stoker_cache("verify", "Other-0", f"Other-{'0' * 16}")[1].count("all intact") == 1


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
        '{"format": 2, "made": "\\u001b[2J", "key": {"samples": 40, "arguments": "\\u001b[2J"}}'
    )
    os.mkfifo(mine / "fifo.npy")
    shutil.copytree(cache, place.cache / "Nested-0123456789abcdef")
    (place.cache / "Nested-0123456789abcdef" / "manifest.json").write_text("[" * 100_000)
    (place.cache / "Nested-0123456789abcdef" / "sources.json").write_text("[" * 100_000)
    held = sorted(p.name for p in place.cache.iterdir())
    assert [c.name for c in manage.listed(place.cache) if c.state == "damaged"] != []
    code, out, _ = stoker_cache("ls")
    assert code == 0
    assert [line.split()[-1] for line in out.splitlines()[1:4]].count("damaged") == 2
    assert "\x1b" not in out
    assert stoker_cache("verify")[0] == 1
    assert not trap.exists()
    assert sorted(p.name for p in place.cache.iterdir()) == held
    assert stoker_cache("prune", "--all")[0] == 0
    left = {n for n in held if not n.startswith(("Evil", "Nested", cache.name))}
    assert {p.name for p in place.cache.iterdir()} == left


@pytest.mark.parametrize("kept", ["shut", "full"])
def test_a_reason_is_shown(place: Place, stoker_cache: Any, kept: str) -> None:
    path = only(place)
    words, head = np.load(path / "words.npy", mmap_mode="r+"), np.load(path / "head.npy", mmap_mode="r+")
    reason = "the \x1b[31mbudget is full"
    words[1 << 16 : (1 << 16) + len(reason)] = list(reason.encode())
    head[vars(Head)["reason_length"].index], head[5] = len(reason), N - 1
    if kept == "shut":
        head[0] = 3
    del words, head
    code, out, _ = stoker_cache("ls")
    assert code == 0
    assert ("refused" if kept == "shut" else "full") in out
    assert ": the ?[31mbudget is full" in out
    assert "39/40" in out
    assert stoker_cache("verify")[0] == 0


def test_a_table_fits_eighty_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    def cache(name: str, filled: int) -> manage.Cache:
        state = "complete" if filled == 1_281_167 else "filling"
        return manage.Cache(
            tmp_path / name, 1_281_167, filled, 197 << 30, 1 << 40, "2026-01-02 03:04:05", 0.0, state, ""
        )

    for name in ("ImageFolder", "A" * 40):
        names = [f"{name}-{'0' * k}{'1' * (16 - k)}" for k in range(9)]
        text = cache_command._listed(tmp_path, [cache(n, 640_583 * (1 + k % 2) + k % 2) for k, n in enumerate(names)])
        assert max(map(len, text.splitlines()[:-1])) <= 80
        shown = [word for word in text.split() if word.startswith(f"{name}-")]
        assert [[n for n in names if n.startswith(s)] for s in shown] == [[n] for n in names]
        assert "640,583/1,281,167" in text
        assert "99%" not in text


# -- verify


def test_a_flipped_byte_is_found_and_mended(place: Place, stoker_cache: Any) -> None:
    """The command does not know the named tuple of the samples; nothing is put together."""
    flip(only(place) / "column-0.npy", 128 + 17 * 3 * 16 * 16 * 2 + 100)
    p = place.run("verify", "--json", "-")
    assert p.returncode == 1, p.stderr
    (found,) = json.loads(p.stdout)["caches"]
    assert (found["checked"], found["damaged"], found["error"], found["mended"]) == (N, [17], "", True)
    assert stoker_cache("ls")[1].splitlines()[1].split()[1] == "39/40"
    assert stoker_cache("verify")[:2] == (0, f"{only(place).name}: 39 samples, all intact\n")
    before = place.made
    code, out, _ = stoker_cache("build", place.target("staged"), "--workers", "0")
    assert (code, out.startswith("40 of 40 samples cached")) == (0, True)
    assert place.made - before <= 1 + COMPARED
    assert "40 samples, all intact" in stoker_cache("verify", only(place).name)[1]


def test_text_names_the_first_that_are_damaged(place: Place, stoker_cache: Any) -> None:
    for row in range(12):
        flip(only(place) / "crc.npy", 128 + 4 * row)
    code, out, _ = stoker_cache("verify")
    which = "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ..."
    assert code == 1
    assert out == f"{only(place).name}: 12 of 40 samples damaged: {which}: removed, the next run makes them anew\n"


@pytest.mark.parametrize("name", ["column-0.npy", "place.npy", "head.npy", "crc.npy", "words.npy", "manifest.json"])
def test_a_truncated_file_is_said(place: Place, stoker_cache: Any, name: str) -> None:
    path = only(place) / name
    os.truncate(path, path.stat().st_size // 2)
    code, out, _ = stoker_cache("verify")
    assert code == 1
    assert name in out
    assert "the next run makes it anew" in out
    assert ("is truncated" in out) == name.endswith(".npy")
    code, out, _ = stoker_cache("ls")
    assert (code, out.splitlines()[1].split()[-1]) == (0, "damaged")


@pytest.mark.parametrize("seed", range(6))
def test_a_flipped_byte_anywhere_ends_no_command(place: Place, stoker_cache: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    print("seed", seed)
    for _ in range(4):
        path = rng.choice(sorted(p for p in only(place).iterdir() if p.stat().st_size))
        flip(path, int(rng.integers(min(path.stat().st_size, 4000))))
        for args in (("ls",), ("verify",)):
            assert stoker_cache(*args)[0] in (0, 1)


# -- prune


def test_prune(place: Place, stoker_cache: Any) -> None:
    cache = only(place)
    for k in range(4):
        shutil.copytree(cache, place.cache / f"Other{k}-{'0' * 16}")
    assert stoker_cache("prune")[0] == 2
    assert stoker_cache("prune", "Other0", "--all")[0] == 2
    code, out, _ = stoker_cache("prune", "Other0", "Other1", "--dry-run", "--json", "-")
    found = json.loads(out)
    assert (code, [Path(c["path"]).name[:6] for c in found["removed"]], found["left"]) == (0, ["Other0", "Other1"], [])
    assert len(manage.listed(place.cache)) == 5
    code, out, _ = stoker_cache("prune", "Other0", "Other1")
    assert code == 0
    assert out.splitlines()[-1] == f"{human_bytes(found['nbytes'])} freed"
    assert len(manage.listed(place.cache)) == 3

    old = time.time() - 10 * 86_400
    os.utime(place.cache / f"Other2-{'0' * 16}" / "head.npy", (old, old))
    assert stoker_cache("prune", "--older-than", "11")[:2] == (0, f"nothing to remove in {place.cache}\n")
    assert "Other2" in stoker_cache("prune", "--older-than", "9.5")[1]
    assert len(manage.listed(place.cache)) == 2

    assert "nothing to remove" in stoker_cache("prune", "--unused")[1]
    sources = json.loads((cache / "sources.json").read_text())
    sources[3][0] = "relative/to/nobody/knows.txt"
    (cache / "sources.json").write_text(json.dumps(sources))
    assert "nothing to remove" in stoker_cache("prune", "--unused")[1]
    sources[4][2] += 1
    (cache / "sources.json").write_text(json.dumps(sources))
    assert "nothing to remove" in stoker_cache("prune", "--unused", "--older-than", "1")[1]  # both
    assert cache.name in stoker_cache("prune", "--unused")[1]
    assert [c.name[:6] for c in manage.listed(place.cache)] == ["Other3"]

    gone = place.cache / ".gone-x"  # of a removal that was killed
    gone.mkdir()
    (place.cache / f"Other3-{'0' * 16}").rename(gone / f"Other3-{'0' * 16}")
    (place.cache / ".gone-y").mkdir()
    (place.cache / ".gone-y" / "thesis").mkdir()
    assert " freed" in stoker_cache("prune", "--all")[1]
    assert [p.name for p in place.cache.iterdir()] == [".gone-y"]


def test_source_files_known_by_their_content(place: Place, stoker_cache: Any, tmp_path: Path) -> None:
    from stoker.staging.cache_key import Sources

    file = tmp_path / "source.txt"
    file.write_text("a")
    entries = Sources([str(file)], content=True).files
    (only(place) / "sources.json").write_text(json.dumps(entries))
    file.touch()
    assert "nothing to remove" in stoker_cache("prune", "--unused", "--dry-run")[1]
    file.write_text("b")
    assert only(place).name in stoker_cache("prune", "--unused", "--dry-run")[1]
