"""A cache on disk: found again, filled by many, and nothing wrong served, whatever happens to it."""

from __future__ import annotations

import array
import copy
import io
import json
import linecache
import os
import random
import shutil
import signal
import subprocess
import sys
import types
import warnings
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import stoker
from stoker.core.errors import StokerWarning
from stoker.staging.store import folder, manage
from tests.helpers import flip

N = 40


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Source files with a number in each."""
    out = []
    (tmp_path / "source").mkdir()
    for i in range(N):
        out.append(tmp_path / "source" / f"{i:03}.txt")
        out[-1].write_text(str(i * 10))
    return out


made = io.StringIO()  # one line a sample that was made; a list would be a part of what prepare depends on


def prepare(path: Any) -> tuple[torch.Tensor, str]:
    made.write(Path(path).name + "\n")
    return torch.full((3, 40, 40), int(Path(path).read_text()), dtype=torch.int16), Path(path).name


def rows(path: Any) -> torch.Tensor:
    return prepare(path)[0]


def other(path: Any) -> torch.Tensor:
    return rows(path) + 1


def open_cache(files: list[Path], where: Path, fn: Any = rows, **settings: Any) -> Any:
    return stoker.Staged(list(map(str, files)), prepare=fn, cache="disk", cache_dir=where, **settings)


def check(staged: Any, add: int = 0, values: Any = None) -> int:
    """Everything is right. Returns how many samples were made anew."""
    made.truncate(made.seek(0))
    for i in range(N):
        got = staged[i]
        got = got[0] if isinstance(got, tuple) else got
        want = (values or {}).get(i, i * 10) + add
        assert got.shape == (3, 40, 40)
        assert bool((got == want).all()), i
    return made.getvalue().count("\n")


@pytest.fixture(params=[rows, prepare], ids=["columns", "heap"])
def fn(request: Any) -> Any:
    return request.param


def cache_of(where: Path) -> Path:
    (found,) = folder.caches(where)
    return found


@pytest.mark.few(1)
def test_the_next_run_finds_it(files: list[Path], tmp_path: Path, fn: Any) -> None:
    where = tmp_path / "cache"
    assert check(open_cache(files, where, fn)) == N
    assert not cache_of(where).name.endswith(".part")
    again = open_cache(files, where, fn)
    assert check(again) == 0
    assert again.account.filled == N
    assert (where.stat().st_mode & 0o77, cache_of(where).stat().st_mode & 0o77) == (0, 0)
    found = np.load(cache_of(where) / "place.npy", allow_pickle=False)  # anybody's NumPy reads it
    assert found.shape == (N,)
    assert found.all()
    if fn is rows:
        column = np.load(cache_of(where) / "column-0.npy", mmap_mode="r").view(np.int16)
        assert sorted(set(column.tolist())) == [i * 10 for i in range(N)]


@pytest.mark.few(1)
def test_a_begun_cache_is_gone_on_with(files: list[Path], tmp_path: Path, fn: Any) -> None:
    where = tmp_path / "cache"
    staged = open_cache(files, where, fn)
    for i in range(0, N, 2):
        staged[i]
    assert cache_of(where).name.endswith(".part")
    again = open_cache(files, where, fn)
    assert check(again) == N // 2
    assert not cache_of(where).name.endswith(".part")


SCRIPT = """
import sys, pathlib
sys.path.insert(0, {root!r})
import stoker, tests.staging.test_disk_cache as t
files = sorted(pathlib.Path({source!r}).iterdir())
data = t.open_cache(files, pathlib.Path({where!r}), getattr(t, {fn!r}))
print("open", flush=True)
loader = stoker.DataLoader(data, batch_size=2, num_workers={workers}, shuffle=True)
for _ in range({epochs}):
    for batch in loader:
        print("batch", flush=True)
print("filled", data.account.filled, flush=True)
"""


def child(files: list[Path], where: Path, fn: Any, workers: int = 2, epochs: int = 1) -> subprocess.Popen[str]:
    code = SCRIPT.format(
        root=str(Path(__file__).parents[2]),
        source=str(files[0].parent),
        where=str(where),
        fn=fn.__name__,
        workers=workers,
        epochs=epochs,
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """As in workers: else some of the samples that they made are made again, to compare."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize(("fn", "moment"), [(rows, 3), (prepare, 11)])
@pytest.mark.usefixtures("_one_thread")
def test_a_run_that_is_killed_while_it_fills_leaves_nothing_wrong(
    files: list[Path], tmp_path: Path, fn: Any, moment: int
) -> None:
    where = tmp_path / "cache"
    p = child(files, where, fn)
    assert p.stdout is not None
    for _ in range(moment + 1):
        p.stdout.readline()
    os.killpg(p.pid, signal.SIGKILL)
    p.wait(20)
    torch.set_num_threads(1)  # as in the workers that made them, so that none are made again to compare
    staged = open_cache(files, where, fn)
    before = staged.account.filled
    assert check(staged) == N - before
    assert check(open_cache(files, where, fn)) == 0


@pytest.mark.slow
def test_many_runs_fill_one_cache(files: list[Path], tmp_path: Path, fn: Any) -> None:
    where = tmp_path / "cache"
    runs = [child(files, where, fn, workers=w) for w in (0, 2)]
    out = [p.communicate(timeout=90)[0] for p in runs]
    assert [p.returncode for p in runs] == [0, 0]
    assert all(f"filled {N}" in text or "filled" in text for text in out)
    assert check(open_cache(files, where, fn)) == 0
    assert len(list(where.iterdir())) == 1


@pytest.mark.few(1)
def test_a_changed_source_file_is_found(files: list[Path], tmp_path: Path, fn: Any) -> None:
    where = tmp_path / "cache"
    check(open_cache(files, where, fn))
    files[7].write_text("31000")
    with pytest.warns(StokerWarning, match="the source files changed"):
        staged = open_cache(files, where, fn)
    assert check(staged, values={7: 31000}) == N
    with pytest.warns(StokerWarning, match="the source files changed"):
        stoker.Staged(list(map(str, files[:-1])), prepare=fn, cache="disk", cache_dir=where)


def test_changed_code_or_another_word_begins_another_cache(files: list[Path], tmp_path: Path) -> None:
    where = tmp_path / "cache"
    check(open_cache(files, where))
    with pytest.warns(StokerWarning, match="the code changed"):
        assert check(open_cache(files, where, other), add=1) == N
    with pytest.warns(StokerWarning, match="extra"):
        assert check(open_cache(files, where, cache_key="v2")) == N
    assert check(open_cache(files, where)) == 0
    assert len(folder.caches(where)) == 3


def test_what_changed_without_a_trace_is_found_by_a_sample(files: list[Path], tmp_path: Path) -> None:
    where, added = tmp_path / "cache", tmp_path / "added"

    def fn(path: str) -> torch.Tensor:
        return rows(path) + int(added.with_suffix(".txt").read_text())  # a file that no argument names

    added.with_suffix(".txt").write_text("0")
    check(open_cache(files, where, fn))
    added.with_suffix(".txt").write_text("1")
    with pytest.warns(StokerWarning, match="differs from the one in"):
        staged = open_cache(files, where, fn)
    assert check(staged, add=1) == N


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.few(1)
def test_a_flipped_byte_is_never_served(files: list[Path], tmp_path: Path, fn: Any, seed: int) -> None:
    """Anywhere in the cache."""
    where = tmp_path / "cache"
    check(open_cache(files, where, fn))
    rng = random.Random(seed)
    print("seed", seed)
    held = [p for p in sorted(cache_of(where).iterdir()) if p.stat().st_size]
    for path in rng.sample(held, 3):
        size = path.stat().st_size
        # most of a heap is a hole
        at = rng.randrange(min(size, 20_000) if path.name == "heap.npy" else size)
        print(path.name, at)
        flip(path, at)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StokerWarning)
        staged = open_cache(files, where, fn)
        check(staged)
        check(staged)
        check(open_cache(files, where, fn))


def test_damaged_samples_are_made_anew_and_mended(files: list[Path], tmp_path: Path) -> None:
    where = tmp_path / "cache"
    check(open_cache(files, where))
    flip(cache_of(where) / "column-0.npy", 5000)
    staged = open_cache(files, where)
    assert check(staged) == 1
    assert check(staged) == 0
    assert check(open_cache(files, where)) == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["column-0.npy", "place.npy", "head.npy", "crc.npy", "words.npy", "manifest.json"])
def test_a_truncated_file_is_said(files: list[Path], tmp_path: Path, name: str) -> None:
    where = tmp_path / "cache"
    check(open_cache(files, where))
    path = cache_of(where) / name
    os.truncate(path, path.stat().st_size // 2)
    with pytest.warns(StokerWarning, match=f"{name}.*creating a new cache"):
        staged = open_cache(files, where)
    assert check(staged) == N
    assert check(open_cache(files, where)) == 0


def namespace() -> bool:
    """Whether a process may have a file system of its own."""
    words = ["unshare", "-rm", "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/mnt"]
    try:
        return subprocess.run(words, capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


FULL = """
import subprocess, sys, warnings
from pathlib import Path
sys.path.insert(0, {root!r})
import torch, stoker
from tests.staging.test_disk_cache import prepare, rows

fn = {fn}
files = sorted(map(str, Path({source!r}).iterdir()))

def epoch(words, where):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        staged = stoker.Staged(files, prepare=fn, cache="disk", cache_dir=where, cache_budget="10MB")
        for workers in (0, 2):
            for i, batch in enumerate(stoker.DataLoader(staged, batch_size=5, num_workers=workers)):
                values = batch[0] if fn is prepare else batch
                assert torch.equal(values[:, 0, 0, 0], torch.arange(i * 5, i * 5 + 5, dtype=torch.int16) * 10), values
    print(words, staged.account.filled, staged.account.reason, [str(w.message) for w in said], sep="|", flush=True)

for size in {sizes}:
    where = Path({where!r}, size)
    where.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=" + size, "tmpfs", where], check=True)
    epoch(size, where)
    subprocess.run(["mount", "-o", "remount,size=20m", where], check=True)
    epoch("room", where)
"""
SIZES = ("8k", "180k", "400k")


@pytest.mark.slow
@pytest.mark.skipif(not namespace(), reason="no file system of one's own to be had (unshare(1))")
def test_a_full_disk_is_said(files: list[Path], tmp_path: Path, fn: Any) -> None:
    where = tmp_path / "cache"
    where.mkdir()
    script = tmp_path / "script.py"
    source = str(files[0].parent)
    root = str(Path(__file__).parents[2])
    script.write_text(FULL.format(root=root, fn=fn.__name__, source=source, where=str(where), sizes=SIZES))
    done = subprocess.run(["unshare", "-rm", sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split("|") for line in done.stdout.splitlines()]
    assert [line[0] for line in lines[::2]] == list(SIZES)
    for full, room in zip(lines[::2], lines[1::2], strict=True):
        assert int(full[1]) < N
        assert int(full[1]) or full[0] != "400k"
        assert "No space left on device" in full[2] + full[3]
        assert room[:3] == ["room", str(N), ""]  # once there is room it is used


@pytest.mark.few(1)
def test_the_budget_of_the_disk(files: list[Path], tmp_path: Path, fn: Any) -> None:
    where = tmp_path / "cache"
    staged = open_cache(files, where, fn, cache_budget="100KB")
    check(staged)
    account = staged.account
    assert 0 < account.filled < N
    assert account.nbytes <= 100_000
    used = sum(p.stat().st_blocks * 512 for p in cache_of(where).iterdir())
    assert used < 100_000 + 250_000  # the rest is tables of its own
    with pytest.warns(StokerWarning, match="was full"):
        larger = open_cache(files, where, fn, cache_budget="2MB")
    assert check(larger) == N
    assert check(larger) == 0


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() == 0 and not shutil.which("setpriv"), reason="root may write anywhere")
@pytest.mark.parametrize("fn", [prepare])
def test_a_folder_that_can_only_be_read(files: list[Path], tmp_path: Path, fn: Any) -> None:
    where = tmp_path / "cache"
    for file in files:
        file.chmod(0o644)  # before: it changes the file's stamp
    assert f"filled {N}" in child(files, where, fn).communicate(timeout=90)[0]  # a run like the other
    code = SCRIPT.format(
        root=str(Path(__file__).parents[2]),
        source=str(files[0].parent),
        where=str(where),
        fn=fn.__name__,
        workers=2,
        epochs=2,
    )
    command = [sys.executable, "-W", "always", "-c", code]
    if os.geteuid() == 0:
        above = [p for p in tmp_path.parents if "pytest-of-" in str(p)]
        for p in [tmp_path, *above, *tmp_path.rglob("*")]:
            if p not in files:
                p.chmod(0o755 if p.is_dir() else 0o644)
        command = ["setpriv", "--reuid=65534", "--clear-groups", *command]
    else:
        for p in (cache_of(where), where):
            p.chmod(0o500)
    env = {**os.environ, "HOME": str(tmp_path)}
    p = subprocess.run(command, capture_output=True, text=True, timeout=90, env=env, cwd="/")
    if p.returncode and "Permission" in p.stderr and "stoker" not in p.stderr.split("Permission")[0][-200:]:
        pytest.skip("this interpreter is not for everybody")
    assert p.returncode == 0, p.stderr
    assert f"filled {N}" in p.stdout, p.stderr


def test_nothing_in_a_cache_is_unpickled(files: list[Path], tmp_path: Path) -> None:
    class Odd:
        def __init__(self, x: int) -> None:
            self.x = x

        def __eq__(self, o: object) -> bool:
            return isinstance(o, Odd) and o.x == self.x

    where = tmp_path / "cache"
    staged = stoker.Staged(list(map(str, files)), prepare=lambda p: Odd(len(p)), cache="disk", cache_dir=where)
    with pytest.warns(StokerWarning, match="Odd"):
        staged[3]
    assert staged[3] == Odd(len(str(files[3])))
    assert staged.account.filled == 0


def test_auto_is_the_disk_where_a_folder_is_given(files: list[Path], tmp_path: Path) -> None:
    for _ in range(2):  # the second one finds what the first has stored
        staged = stoker.Staged(list(map(str, files)), prepare=rows, cache_dir=tmp_path / "cache")
        check(staged)
    assert staged.account.filled == N
    assert made.tell() == 0 or check(staged) == 0
    assert isinstance(staged._store.medium, folder.Folder)


def test_a_folder_that_cannot_be_made_is_said(files: list[Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(StokerWarning, match="There is no cache in"):
        staged = open_cache(files, tmp_path / "file" / "cache")
    assert check(staged) == N


def asks(path: Any) -> torch.Tensor:
    os.environ.get("HOME")
    return rows(path)


@pytest.mark.slow
def test_the_environment_is_a_key_if_it_is_read_and_not_written_down(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = tmp_path / "cache"
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    check(open_cache(files, where, asks))
    assert "hunter2" not in (cache_of(where) / "manifest.json").read_text()
    monkeypatch.setenv("SECRET_TOKEN", "other")
    with pytest.warns(StokerWarning, match="what the dataset holds changed"):
        assert check(open_cache(files, where, asks)) == len(files)
    for file in files:
        hash(file)
    paths = tmp_path / "paths"
    check(stoker.Staged(files, prepare=asks, cache="disk", cache_dir=paths))
    again = [Path(str(file)) for file in files]  # never hashed
    assert check(stoker.Staged(again, prepare=asks, cache="disk", cache_dir=paths)) == 0


PAIR = """
import collections, sys, torch, stoker
Pair = collections.namedtuple("Pair", "x y")
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 20
    def __getitem__(self, i):
        return Pair(torch.full((2,), i), i)
def staged():
    return stoker.Staged(Data(), cache="disk", cache_dir=sys.argv[1])
if __name__ == "__main__":
    data = staged()
    before = data.account.filled
    assert all(type(data[i]) is Pair and data[i].y == i for i in range(20))
    print(before, data.account.filled)
"""


@pytest.mark.slow
def test_a_class_of_the_script_is_the_same_when_it_is_imported(tmp_path: Path) -> None:
    (tmp_path / "pairs.py").write_text(PAIR)

    def run(*command: str) -> str:
        p = subprocess.run(
            [sys.executable, *command, str(tmp_path / "cache")],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tmp_path,
        )
        assert p.returncode == 0, p.stderr
        return p.stdout + p.stderr

    fill = "import pairs; d = pairs.staged(); [d[i] for i in range(20)]"
    run("-c", fill)
    assert run("pairs.py") == "20 20\n"


class Held(Dataset[Any]):
    """Samples that come from an array, not from files."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.values[i] * 2


@pytest.mark.slow
def test_arrays_are_a_key_whole(tmp_path: Path) -> None:
    values = torch.arange(100_000.0)
    first = stoker.Staged(Held(values), cache="disk", cache_dir=tmp_path)
    for i in range(0, 100, 10):
        first[i]
    changed = values.clone()
    changed[77_777] = -1
    with pytest.warns(StokerWarning, match="what the dataset holds changed"):
        again = stoker.Staged(Held(changed), cache="disk", cache_dir=tmp_path)
    assert float(again[77_777]) == -2
    manifest = json.loads((folder.caches(tmp_path)[0] / "manifest.json").read_text())
    assert manifest["format"] == folder.FORMAT


class Record:
    __slots__ = ("path",)

    def __init__(self, path: str) -> None:
        self.path = path


class Files(Dataset[Any]):
    def __init__(self, names: Any, img_dir: Any = None) -> None:
        self.names = names
        if img_dir is not None:
            self.img_dir = img_dir

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> torch.Tensor:
        name = self.names % i if isinstance(self.names, str) else self.names[i]
        with open(os.path.join(getattr(self, "img_dir", ""), os.fsdecode(getattr(name, "path", name)))) as file:
            return torch.tensor(float(file.read()))


NAMED: dict[str, Any] = {
    "array": lambda names, _: Files(np.array(names)),
    "array of objects": lambda names, _: Files(np.array(names, dtype=object)),
    "array of bytes": lambda names, _: Files(np.array(names, dtype="S")),
    "deque": lambda names, _: Files(deque(names)),
    "bytes": lambda names, _: Files([os.fsencode(n) for n in names]),
    "slots": lambda names, _: Files([Record(n) for n in names]),
    "relative": lambda names, here: Files([os.path.basename(n) for n in names], str(here)),
    "relative, as a Path": lambda names, here: Files([os.path.basename(n) for n in names], here),
    "made up": lambda _, here: Files("%d.txt", str(here)),
}


@pytest.mark.parametrize("how", NAMED)
@pytest.mark.slow
def test_source_files_are_found_however_they_are_named(how: str, tmp_path: Path) -> None:
    here = tmp_path / "files"
    here.mkdir()
    names = [str(here / f"{i}.txt") for i in range(20)]
    for i, name in enumerate(names):
        Path(name).write_text(str(i))

    def run() -> list[float]:
        staged = stoker.Staged(NAMED[how](names, here), cache="disk", cache_dir=tmp_path / "cache")
        for i in range(20):
            staged[i]
        return [float(staged[i]) for i in range(20)]

    assert run() == [*map(float, range(20))]
    folders = sorted(c.name for c in folder.caches(tmp_path / "cache"))
    assert run() == [*map(float, range(20))]
    assert sorted(c.name for c in folder.caches(tmp_path / "cache")) == folders  # and is the same to the next run
    Path(names[17]).write_text("999999")
    with pytest.warns(StokerWarning, match="the source files changed"):
        assert run()[17] == 999999


HELD = [
    np.arange(1000.0).astype(object),
    deque(range(1000)),
    array.array("d", range(1000)),
    bytearray(k % 256 for k in range(1000)),
]


@pytest.mark.slow
@pytest.mark.parametrize("held", HELD, ids=lambda x: type(x).__name__)
def test_what_a_dataset_holds_is_a_key(held: Any, tmp_path: Path) -> None:
    class Labels(Dataset[Any]):
        def __init__(self, labels: Any) -> None:
            self.labels = labels

        def __len__(self) -> int:
            return 1000

        def __getitem__(self, i: int) -> torch.Tensor:
            return torch.tensor(float(self.labels[i]))

    first = stoker.Staged(Labels(held), cache="disk", cache_dir=tmp_path)
    assert [float(first[517]) for _ in range(2)] == [float(held[517])] * 2
    other = copy.copy(held)
    other[517] = 9
    with pytest.warns(StokerWarning, match="what the dataset holds changed"):
        assert float(stoker.Staged(Labels(other), cache="disk", cache_dir=tmp_path)[517]) == 9


PRINTED = """
import functools, sys, threading, torch
from pathlib import Path

SIZE, UNUSED = {size}, {unused}

@functools.lru_cache
def helper(x):
    return x * {factor}

class Data:
    scale = {scale}

    def __init__(self):
        self.name, self.lock, self.path, self.me = "torch", threading.Lock(), Path("a"), self
        self.names = {{"b", "a", "c", "d"}}, frozenset("xyz")

    def __getitem__(self, i):
        return torch.full((SIZE,), self.make(i))

    def make(self, i):
        return helper(i) + self.scale

def show():
    from stoker.staging.inputs import Inputs
    found = Inputs(Data(), across_runs=True)
    print(*found.keys(), "torch" in found.packages)

if __name__ == "__main__":
    show()
"""


@pytest.mark.slow
def test_a_fingerprint_goes_into_the_code_that_makes_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "printed.py"

    def show(**values: Any) -> list[str]:
        path.write_text(PRINTED.format(**{"size": 3, "unused": 1, "factor": 2, "scale": 1} | values))
        linecache.clearcache()
        module: Any = types.ModuleType("printed")
        module.__file__ = str(path)
        monkeypatch.setitem(sys.modules, "printed", module)
        exec(compile(path.read_text(), path, "exec"), vars(module))
        module.show()
        return capsys.readouterr().out.split()

    content, code, _ = first = show()
    p = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True)
    assert first == p.stdout.split() == show(unused=2) == [content, code, "True"]
    assert [x == y for x, y in zip(first, show(factor=3), strict=True)] == [True, False, True]
    for change in ({"size": 4}, {"scale": 2}):
        assert [x == y for x, y in zip(first, show(**change), strict=True)] == [False, True, True]


def test_a_file_of_another_size_and_the_same_time_begins_another_cache(files: list[Path], tmp_path: Path) -> None:
    where = tmp_path / "cache"
    assert check(open_cache(files, where)) == N
    before = files[17].stat()
    files[17].write_text("12345")
    os.utime(files[17], ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.warns(StokerWarning, match="the source files changed"):
        again = open_cache(files, where)
    assert check(again, values={17: 12345}) == N


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


def make_foreign(path: Path) -> None:
    os.chown(path, 12345, 12345)


def make_open(path: Path) -> None:
    path.chmod(0o777 if path.is_dir() else 0o666)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [pytest.param(make_foreign, "belongs to another user", marks=as_root), (make_open, "is writable by other")],
)
def test_a_cache_that_others_have_made_or_can_write_to_is_refused(
    files: list[Path], tmp_path: Path, spoil: Any, words: str
) -> None:
    where = tmp_path / "cache"
    check(open_cache(files, where))
    spoil(cache_of(where))
    with pytest.warns(StokerWarning, match=f"There is no cache in .*: .*{words}"):
        staged = open_cache(files, where)
    assert check(staged) == N
    assert os.listdir(where) == [cache_of(where).name]  # nothing of a removal is left


@pytest.mark.few(1)
@pytest.mark.parametrize("spoil", [pytest.param(make_foreign, marks=as_root), make_open])
def test_a_file_that_others_can_write_to_is_made_anew(files: list[Path], tmp_path: Path, spoil: Any) -> None:
    where = tmp_path / "cache"
    check(open_cache(files, where))
    spoil(cache_of(where) / "column-0.npy")
    with pytest.warns(StokerWarning, match="creating a new cache"):
        staged = open_cache(files, where)
    assert check(staged) == N
    assert check(open_cache(files, where)) == 0


def test_a_cache_under_the_name_of_another_is_made_anew(files: list[Path], tmp_path: Path) -> None:
    where = tmp_path / "cache"
    check(open_cache(files, where, other), add=1)
    theirs = cache_of(where)
    check(open_cache(files, where))
    (mine,) = [p for p in where.iterdir() if p != theirs]
    shutil.rmtree(mine)
    theirs.rename(mine)
    with pytest.warns(StokerWarning, match="made for different samples: creating a new cache"):
        staged = open_cache(files, where)
    assert check(staged) == N


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["manifest.json", "column-0.npy", "lock"])
@pytest.mark.parametrize("kind", ["fifo", "zero", "copy", "folder"])
def test_links_and_pipes_inside_a_cache_are_not_read(files: list[Path], tmp_path: Path, name: str, kind: str) -> None:
    where = tmp_path / "cache"
    check(open_cache(files, where))
    path = cache_of(where) / name
    elsewhere = tmp_path / "elsewhere"
    shutil.copy(path, elsewhere)
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path, 0o600)
    elif kind == "folder":
        path.mkdir(0o700)
    else:
        path.symlink_to("/dev/zero" if kind == "zero" else elsewhere)
    before = elsewhere.read_bytes()
    assert len(manage.listed(where)) <= 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StokerWarning)
        check(open_cache(files, where))
    assert elsewhere.read_bytes() == before


def test_a_folder_that_is_a_link_is_not_followed(files: list[Path], tmp_path: Path) -> None:
    where, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    check(open_cache(files, where))
    path = cache_of(where)
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    with pytest.warns(StokerWarning, match="creating a new cache"):
        staged = open_cache(files, where)
    assert check(staged) == N
    assert (elsewhere / "manifest.json").exists()


def test_words_that_are_no_text_are_made_anew(files: list[Path], tmp_path: Path) -> None:
    where = tmp_path / "cache"
    check(open_cache(files, where))
    with open(cache_of(where) / "words.npy", "r+b") as file:
        file.seek(128)
        file.write(b"\xff" * 1024)
    with pytest.warns(StokerWarning, match="creating a new cache"):
        staged = open_cache(files, where)
    assert check(staged) == N


def test_all_that_is_made_is_private(files: list[Path], tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        check(open_cache(files, tmp_path / "a" / "b"))
    finally:
        os.umask(before)
    for path in (tmp_path / "a", *(tmp_path / "a").rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
