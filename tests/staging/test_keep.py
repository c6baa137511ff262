"""Caches that are kept between runs: what the next one finds, and what it must not."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from stoker.core.errors import StokerWarning, UsageError
from stoker.staging import cache_key, keep, source_files, trial
from stoker.staging.cache_key import name_of
from stoker.staging.change_watch import STALE
from stoker.staging.dataset import Staged
from stoker.staging.library_objects import files_read
from stoker.staging.store import folder as folder_module
from stoker.staging.store.encode import CacheError
from stoker.staging.store.manage import listed

N = 40
HIDDEN = ctypes.c_double(0.0)


class Rows(Dataset[torch.Tensor]):
    def __init__(self, folder: Path, scale: float = 2.0) -> None:
        self.folder, self.scale = folder, scale

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> torch.Tensor:
        x = torch.full((8, 8), float((self.folder / f"{i}.txt").read_text())) * self.scale
        return x if torch.rand(()) < 0.5 else x.flip(1)


class Odd:
    def __init__(self, x: float) -> None:
        self.x = x


class Objects(Rows):
    def __getitem__(self, i: int) -> Any:
        return Odd(float((self.folder / f"{i}.txt").read_text()))


@pytest.fixture(autouse=True)
def _beside_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer of the lowest priority would hardly run, and results of calls, which are not written, might seem better
    than a first part. A descriptor of another test's file may be N, a number that the datasets hold."""
    monkeypatch.setattr(cache_key, "files_read", lambda numbers, base: files_read(numbers - {N}, base))
    monkeypatch.setattr(trial, "CLOCK_S", math.inf)
    assert "os.nice(19)\n" in keep.WRITER
    monkeypatch.setattr(keep, "WRITER", keep.WRITER.replace("os.nice(19)\n", ""))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    out = tmp_path / "data"
    out.mkdir()
    for i in range(N):
        (out / f"{i}.txt").write_text(str(i))
    return out


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tmp_path / "kept"


def run(data: Rows, base: Path, most: int = 1 << 30) -> tuple[Staged, int]:
    staged = Staged(data, cache="ram")
    return staged, staged.keep_between_runs(base, most)


def run_again(data: Rows, base: Path) -> Staged:
    """The next run, which finds all samples."""
    staged, found = run(data, base)
    assert found == N, folder_module._what_changed(base, name_of(data), staged._key(kept_in=base))
    return staged


def epoch(staged: Staged, indices: Any = range(N)) -> None:
    staged._begin()
    for i in indices:
        torch.manual_seed(i)
        x = staged[i]
        torch.manual_seed(i)
        assert torch.equal(x, staged.dataset[i])


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def samples_in(base: Path) -> int:
    """How many samples are on disk."""
    out = 0
    for cache in listed(base):
        with contextlib.suppress(OSError, ValueError):
            out += int(np.count_nonzero(np.load(cache.path / "place.npy")))
    return out


def test_the_next_run_finds_what_was_made(folder: Path, base: Path) -> None:
    first, found = run(Rows(folder), base)
    assert found == 0
    epoch(first)
    assert samples_in(base) == 0  # not before the inputs were compared once more
    epoch(first)
    until(lambda: samples_in(base) == N)
    again = run_again(Rows(folder), base)
    (folder / "7.txt").unlink()
    with pytest.raises(FileNotFoundError):  # the file is an input
        epoch(again)


@pytest.mark.slow
def test_nothing_is_made_twice(folder: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = run(Rows(folder), base)
    epoch(first, range(0, N, 2))
    first._begin()
    until(lambda: samples_in(base) == N // 2)
    again, found = run(Rows(folder), base)
    assert found == N // 2
    epoch(again)
    assert again.account.prepared == N // 2 + N % 2
    again._begin()
    until(lambda: samples_in(base) == N)


@pytest.mark.slow
def test_what_was_changed_in_the_middle_of_an_epoch_is_not_kept(folder: Path, base: Path) -> None:
    staged, _ = run(Rows(folder), base)
    staged._begin()
    for i in range(N):
        if i == N // 2:
            staged.dataset.scale = 3.0
        staged[i]
    with pytest.warns(UserWarning, match="scale"):
        epoch(staged)
    epoch(staged)
    assert not listed(base)


@pytest.mark.few(1)
@pytest.mark.parametrize("edit", ["file", "scale", "size"])
def test_another_input_begins_another_cache(edit: str, folder: Path, base: Path) -> None:
    first, _ = run(Rows(folder), base)
    epoch(first)
    first._begin()
    until(lambda: samples_in(base) == N)
    if edit == "file":
        (folder / "3.txt").write_text("5")
    if edit == "size":
        (folder / "3.txt").write_text("3 ")
    _, found = run(Rows(folder, 4.0 if edit == "scale" else 2.0), base)
    assert found == 0


class Unseen(Rows):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.address = ctypes.addressof(HIDDEN)

    def __getitem__(self, i: int) -> torch.Tensor:
        x = torch.full((8, 8), float(i))
        return x + ctypes.c_double.from_address(self.address).value


@pytest.mark.slow
def test_what_no_key_sees_is_found_by_making_a_sample_again(folder: Path, base: Path) -> None:
    HIDDEN.value = 0.0
    first, _ = run(Unseen(folder), base)
    epoch(first)
    first._begin()
    until(lambda: samples_in(base) == N)
    HIDDEN.value = 1.0
    _, _ = again = run(Unseen(folder), base)
    assert not listed(base)
    epoch(again[0])


def test_a_stale_sample_removes_the_folder(folder: Path, base: Path) -> None:
    first, _ = run(Rows(folder), base)
    epoch(first)
    first._begin()
    until(lambda: samples_in(base) == N)
    with pytest.warns(UserWarning, match="Cache discarded"):
        first._disable(f"sample 3 {STALE}", stale=True)
    assert not listed(base)


@pytest.mark.slow
def test_a_damaged_sample_is_made_anew(folder: Path, base: Path) -> None:
    first, _ = run(Rows(folder), base)
    epoch(first)
    first._begin()
    until(lambda: samples_in(base) == N)
    (cache,) = listed(base)
    until(lambda: any(cache.path.glob("column-*.npy")))
    column = next(cache.path.glob("column-*.npy"))
    with column.open("r+b") as file:
        file.seek(-300, os.SEEK_END)
        file.write(b"\xff" * 300)
    again, _ = run(Rows(folder), base)
    epoch(again)
    assert 0 < again.account.prepared < N


def test_objects_that_would_be_pickled_stay_in_memory(folder: Path, base: Path) -> None:
    staged, _ = run(Objects(folder), base)
    for _ in range(2):
        staged._begin()
        assert [staged[i].x for i in range(N)] == list(range(N))
    assert staged._kept is not None
    assert "Odd" in staged._kept.why_not
    assert not base.exists()


@pytest.mark.slow
def test_those_that_were_used_longest_ago_make_room(folder: Path, base: Path) -> None:
    for k in range(3):
        staged, _ = run(Rows(folder, float(k + 2)), base, most=1 << 30)
        epoch(staged)
        staged._begin()
        until(lambda k=k: samples_in(base) == N * (k + 1))  # type: ignore[misc]
    taken = [cache.nbytes for cache in listed(base)]
    assert keep._make_space(base, [], taken[0], sum(taken) + taken[0] - 1)
    assert len(listed(base)) == 2
    assert not keep._make_space(base, [], 1 << 40, sum(taken))
    assert len(listed(base)) == 2


def test_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for asked, wanted in (("", 0), ("no", 0), ("5000", 5000)):
        monkeypatch.setenv(keep.KEEP, asked)
        assert keep.quota(tmp_path / "none") == wanted
    monkeypatch.setenv(keep.KEEP, "disk")
    assert keep.quota(tmp_path) > 0
    monkeypatch.setenv(keep.KEEP, "much")
    with pytest.raises(UsageError, match="--keep"):
        keep.quota(tmp_path)


TRAIN = """
import os, sys, time, random, torch
from pathlib import Path
from torch.utils.data import DataLoader, Dataset
class Files(Dataset):
    def __init__(self, root): self.files = sorted(Path(root).iterdir())
    def __len__(self): return len(self.files)
    def __getitem__(self, i):
        x = torch.full((64, 64), float(self.files[i].read_text()))
        for _ in range(60): x = x.exp().log()
        if random.random() < 0.5: x = x.flip(1)
        return x, i
if __name__ == "__main__":
    torch.manual_seed(0); random.seed(0)
    loader = DataLoader(Files(sys.argv[1]), 8, shuffle=True, num_workers=2)
    for epoch in range(8):  # the first trial may end as late as in the third
        print(epoch, sum(float((x * (i + 1)[:, None, None]).sum()) for x, i in loader), flush=True)
        if len(sys.argv) > 2 and epoch == 6:
            time.sleep(60)
"""


@pytest.mark.timeout(600)  # the script's writer has the lowest priority
@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_a_script_that_runs_twice(killed: bool, folder: Path, base: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    env = {**os.environ, "STOKER_CACHE": str(base)}
    words = [sys.executable, "-m", "stoker", "run", "--apply", "--keep", "disk", "train.py", str(folder)]

    def once() -> str:
        return subprocess.run(words, cwd=tmp_path, env=env, text=True, capture_output=True, timeout=120).stdout

    plain = subprocess.run([sys.executable, *words[-2:]], cwd=tmp_path, text=True, capture_output=True, timeout=120)
    if killed:
        p = subprocess.Popen([*words, "waits"], cwd=tmp_path, env=env, stdout=subprocess.PIPE, start_new_session=True)
        until(lambda: samples_in(base) == N)
        os.killpg(p.pid, signal.SIGKILL)
        p.communicate()
    else:
        assert once() == plain.stdout
        until(lambda: samples_in(base) == N)
    assert once() == plain.stdout
    report = json.loads((tmp_path / "stoker-report.json").read_text())
    (entry,) = report["applied"]["settings"].values()
    assert entry["cache"]["from_earlier_runs"] == N


HASHED = """
import sys, torch
from pathlib import Path
from stoker.staging.dataset import Staged
class Hashed(torch.utils.data.Dataset):
    names = [f"sample {{i}}" for i in range(40)]
    def __len__(self): return 40
    def __getitem__(self, i):
        {body}
if __name__ == "__main__":
    staged = Staged(Hashed(), cache="ram")
    found = staged.keep_between_runs(Path(sys.argv[1]), 1 << 30)
    made = [staged[i] for i in range(40)]
    assert all(torch.equal(x, Hashed()[i]) for i, x in enumerate(made))
    staged._begin()
    print(found)
"""


@pytest.mark.timeout(600)  # the script's writer has the lowest priority
@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "is_kept"),
    [
        ("return torch.full((4,), len(self.names[i]) + i)", True),
        ("return torch.tensor([len(n) for n in {'a', 'bb', 'ccc', 'dddd', self.names[i]}])", False),
    ],
)
def test_what_depends_on_hashes_is_not_kept(body: str, is_kept: bool, base: Path, tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(HASHED.format(body=body))
    found = []
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        words = [sys.executable, "run.py", str(base)]
        p = subprocess.run(words, cwd=tmp_path, env=env, text=True, capture_output=True, timeout=120)
        assert p.returncode == 0, p.stderr
        found.append(int(p.stdout))
        until(lambda seed=seed: samples_in(base) == N * (1 if is_kept else int(seed)))  # type: ignore[misc]
    assert found == [0, N if is_kept else 0]


def test_an_extension_module_that_was_built_again_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import _bisect
    import importlib

    if not getattr(_bisect, "__file__", None):
        pytest.skip("this interpreter has no extension module to copy")
    package = tmp_path / "natives"
    package.mkdir()
    (package / "__init__.py").touch()
    file = Path(shutil.copy(_bisect.__file__, package))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("natives._bisect")
    before = cache_key._native_modules({"natives"})
    assert before
    assert cache_key._native_modules({"natives"}) == before
    os.utime(file)
    assert cache_key._native_modules({"natives"}) != before


def test_a_stale_cache_is_shut_before_its_folder_is_removed(
    folder: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a writer that starts in between would copy stale samples to a new folder."""
    staged, _ = run(Rows(folder), base)
    epoch(staged)
    usable: list[bool] = []
    monkeypatch.setattr(keep.KeptSamples, "discard", lambda self: usable.append(staged.usable))
    with pytest.warns(UserWarning, match="Cache discarded"):
        staged._disable(f"sample 3 {STALE}", stale=True)
    assert usable == [False]


def test_keeping_goes_with_apply(tmp_path: Path) -> None:
    for words in (["--keep", "disk"], ["--apply", "--keep", "much"]):
        p = subprocess.run(
            [sys.executable, "-m", "stoker", "run", *words, "train.py"], cwd=tmp_path, text=True, capture_output=True
        )
        assert p.returncode == 2
        assert "--keep" in p.stderr


class Texts(Rows):
    """Samples of varying size, which are blocks of the heap."""

    def __getitem__(self, i: int) -> Any:
        text = "ab" * (i % 7 + 1)
        return (text, list(range(300 + i)), float((self.folder / f"{i}.txt").read_text())), float(torch.rand(()))


def kept(data: Rows, base: Path, monkeypatch: pytest.MonkeyPatch, most: int = 1 << 30, indices: Any = range(N)) -> None:
    """Fills a cache, and writes it in this process."""

    def write(self: keep.KeptSamples, store: Any, filled: Any, damaged: Any) -> None:
        indices = os.memfd_create("indices")
        os.write(indices, np.concatenate([damaged, filled]).tobytes())
        to = (str(self._base), self._name, self._key, self._most)
        keep.write([os.dup(store.medium.fd), indices], self._samples, len(damaged), store.account.nbytes, to)
        os.close(indices)

    with monkeypatch.context() as patch:
        patch.setattr(keep.KeptSamples, "_start_writer", write)
        staged, _ = run(data, base, most)
        for _ in range(2):
            staged._begin()
            for i in indices:
                staged[i]


def on_disk(base: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in (base, *base.rglob("*")))


def spoil_block(cache: Path, i: int, old: bytes, new: bytes) -> None:
    """Replaces bytes of a sample, and makes its checksum right."""
    heap, place = np.load(cache / "heap.npy", mmap_mode="r+"), np.load(cache / "place.npy")
    at = -int(place[i]) - 1
    length = struct.unpack("<IIQ", heap[at : at + 16].tobytes())[2]
    block = heap[at : at + length].tobytes().replace(old, new, 1)
    assert len(block) == length
    block = zlib.crc32(block[4:], zlib.crc32(b"%d:" % i)).to_bytes(4, "little") + block[4:]
    assert block != heap[at : at + length].tobytes()
    heap[at : at + length] = np.frombuffer(block, np.uint8)
    heap.flush()


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("old", "new"),
    [(b"ababab", b"ab\xffbab"), (b"\xdc\x01", b"\xc1\x01"), (b'"s"', b'"\xff"'), (b'"s"', b'"z"'), (b'"L"', b'"i"')],
    ids=["UTF-8", "MessagePack", "no text", "no type", "another type"],
)
def test_a_sample_that_cannot_be_decoded_is_made_anew_and_said_once(
    old: bytes, new: bytes, folder: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(Texts(folder), base, monkeypatch)
    (cache,) = listed(base)
    for i in (13, 34):
        spoil_block(cache.path, i, old, new)
    again = run_again(Texts(folder), base)
    with pytest.warns(StokerWarning, match="cannot be decoded") as said:
        epoch_of_texts(again)
    assert len([w for w in said if "cannot be decoded" in str(w.message)]) == 1
    assert again.account.prepared == 2


def epoch_of_texts(staged: Staged) -> None:
    staged._begin()
    for i in range(N):
        assert staged[i][0] == staged.dataset[i][0]


@pytest.mark.slow
def test_a_cache_of_other_inputs_under_this_name_is_not_read(
    folder: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(Rows(folder, 2.0), base, monkeypatch)
    (old,) = (cache.path for cache in listed(base))
    kept(Rows(folder, 4.0), base, monkeypatch)
    (new,) = (cache.path for cache in listed(base) if cache.path != old)
    shutil.rmtree(new)
    old.rename(new)
    again, found = run(Rows(folder, 4.0), base)
    assert found == 0
    epoch(again)
    kept(Rows(folder, 4.0), base, monkeypatch)  # replaces it
    run_again(Rows(folder, 4.0), base)


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["foreign", "open", "open, but sticky"])
def test_a_folder_in_which_others_may_rename_is_refused(
    how: str, folder: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(Rows(folder), base, monkeypatch)
    if how == "foreign":
        if os.geteuid():
            pytest.skip("only root can give a file away")
        os.chown(base, 12345, 12345)
    else:
        base.chmod(0o1777 if "sticky" in how else 0o777)
    if "sticky" in how:
        run_again(Rows(folder), base)
        return
    with pytest.raises(CacheError, match=r"belongs to another user|is writable by other users"):
        run(Rows(folder), base)


HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "r+b")
fcntl.lockf(file, fcntl.LOCK_EX, 1)
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_another_process_that_holds_the_lock_makes_nobody_wait(
    folder: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(Rows(folder), base, monkeypatch)
    (cache,) = listed(base)
    words = [sys.executable, "-c", HOLD, str(cache.path / "lock")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        again = run_again(Rows(folder), base)
        epoch(again)
        assert again.account.prepared == 0
        monkeypatch.setattr(folder_module, "LOCK_S", 0.1)
        with pytest.raises(TimeoutError, match="another process holds its lock"):  # in the writer
            folder_module.Folder(cache.path)
        other.kill()


@pytest.mark.slow
def test_a_file_that_is_truncated_while_it_is_read_ends_nothing(
    folder: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for data in (Rows(folder), Texts(folder)):
        kept(data, base, monkeypatch)
        again = run_again(data, base)
        again._begin()
        again[0]
        for cache in listed(base):
            for file in cache.path.glob("*.npy"):
                os.truncate(file, 0)
        for i in range(1, N):  # a mapped file would be a SIGBUS
            again[i]
        assert again.account.prepared == N - 1


@pytest.mark.slow
def test_the_bytes_on_disk_stay_below_the_quota(folder: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept_at = []
    for most in range(100_000, 700_000, 50_000):
        shutil.rmtree(base, ignore_errors=True)
        for data in (Rows(folder), Texts(folder)):
            kept(data, base, monkeypatch, most)
            assert on_disk(base) - base.lstat().st_blocks * 512 <= most
        kept_at.append(len(listed(base)))
    assert kept_at[0] == 0
    assert kept_at[-1] == 2


LIBRARY = "{imports}\ndef gain(x): return {body}\n"


def install(site: Path, name: str, version: str, body: str, imports: str = "") -> None:
    package = site / name
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(LIBRARY.format(imports=imports, body=body))
    for old in site.glob(f"{name}-*.dist-info"):
        shutil.rmtree(old)
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def versions(packages: set[str], site: Path) -> dict[str, str]:
    """Their versions in another process, which imports all of them."""
    code = (
        "import sys, json, importlib; sys.path.insert(0, sys.argv[1])\n"
        "for name in sys.argv[2:]: importlib.import_module(name)\n"
        "from stoker.staging.libraries_used import versions_of\n"
        "print(json.dumps(versions_of(sys.argv[2:3])))"
    )
    words = [sys.executable, "-B", "-c", code, str(site), *sorted(packages, reverse=True), "lib_other"]
    return dict(json.loads(subprocess.run(words, check=True, capture_output=True, text=True, timeout=120).stdout))


def installed(site: Path, change: str = "") -> dict[str, str]:
    """Versions of a library and of those beneath it, after a change."""
    top = "import lib_deep\nfrom lib_space import part\n__version__ = "
    install(site, "lib_top", "1.0", "lib_deep.gain(x)", top + ("'2'" if change == "version" else "'1'"))
    install(site, "lib_deep", "2.0" if change == "no version" else "1.0", "x * 3" if change == "beneath" else "x * 2")
    install(site, "lib_other", "2.0" if change == "unused" else "1.0", "x", "import torch")
    (site / "lib_space").mkdir(exist_ok=True)
    (site / "lib_space" / "part.py").write_text("K = 30" if change == "part" else "K = 2")
    for path in site.rglob("*.py"):
        os.utime(
            path, (1, 1 + ({"the same version": "lib_top", "beneath": "lib_deep"}.get(change) == path.parent.name))
        )
    return versions({"lib_top"}, site)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_another_version_of_a_library_begins_another_cache(tmp_path: Path) -> None:
    before = installed(tmp_path)
    assert before.keys() == {"lib_top", "lib_deep", "lib_space"}
    assert installed(tmp_path) == before
    for change, name in {
        "version": "lib_top",
        "no version": "lib_deep",
        "beneath": "lib_deep",
        "the same version": "lib_top",
        "part": "lib_space",
        "unused": "",
    }.items():
        after = installed(tmp_path, change)
        assert {key for key in before if before[key] != after[key]} == set(filter(None, [name])), change


class Placed(Rows):
    """Samples read from ``root``; what is appended names the file of a sample."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name = str(root)[:-1], str(root)[-1] + name  # no string of the dataset names a folder

    def __getitem__(self, i: int) -> torch.Tensor:
        with open(f"{self.root}{self.name.format(i)}") as file:
            x = torch.full((8, 8), float(file.read()))
        return x if torch.rand(()) < 0.5 else x.flip(1)


class Beside(Placed):
    """A file beside the sample's doubles it."""

    def __getitem__(self, i: int) -> torch.Tensor:
        x = super().__getitem__(i)
        return x * 2 if os.path.exists(f"{self.root}{self.name.format(i)}".replace("images", "masks")) else x


PLACES = {
    "deep": "/a/b{0}/c/d/e/f/g/h/x.txt",
    "one per sample": "/drive_{0}/image/data/0.txt",
    "hidden": "/.features/.{0}.txt",
    "hidden folder": "/.features/{0}.txt",
}


def made(root: Path, name: str, cls: type[Placed] = Placed) -> Placed:
    for i in range(N):
        path = Path(f"{root}{name.format(i)}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(i))
    return cls(root, name)


@pytest.mark.slow
@pytest.mark.parametrize("where", [*PLACES, "/tmp", "/dev/shm"])
def test_a_file_counts_wherever_samples_open_it(
    where: str, tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_shared = where not in PLACES
    root = Path(where) / f"stoker-{os.getpid()}-" if is_shared else tmp_path / "data"
    name = "{0}.txt" if is_shared else PLACES[where]
    file, other = Path(f"{root}{name.format(17)}"), Path(where) / f"other-{os.getpid()}.txt"
    try:
        data = made(root, name)
        kept(data, base, monkeypatch)
        again = run_again(data, base)
        if is_shared:
            other.write_text("somebody else's")
            assert not again._watch.changes()
        file.write_text("300")
        assert any(str(file) in change for change in again._watch.changes())
        assert run(data, base)[1] == 0
    finally:
        if is_shared:
            for path in (*(Path(f"{root}{name.format(i)}") for i in range(N)), other):
                path.unlink(missing_ok=True)


@pytest.mark.slow
def test_a_file_counts_that_samples_ask_for_in_vain(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = made(tmp_path / "data", "/images/{0}.txt", Beside)
    kept(data, base, monkeypatch)
    again = run_again(data, base)
    (tmp_path / "data" / "masks").mkdir()
    (tmp_path / "data" / "masks" / "17.txt").touch()
    assert any("17.txt" in change for change in again._watch.changes())
    assert run(data, base)[1] == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("limit", ["MOST_FILES", "MOST_FOLDERS"])
def test_nothing_is_kept_where_not_all_files_can_be_compared(
    limit: str, tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path / "data", "/{0}/x.txt")
    monkeypatch.setattr(source_files, limit, N - 1)

    class Below(Rows):
        def __getitem__(self, i: int) -> torch.Tensor:
            return torch.full((8, 8), float((self.folder / str(i) / "x.txt").read_text()))

    with pytest.raises(UsageError, match=r"to be compared"):
        run(Below(tmp_path / "data"), base)


def test_a_link_to_a_folder_above_is_followed_once(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "up").symlink_to(tmp_path)
    (tmp_path / "a" / "again").symlink_to(tmp_path / "a" / "b")
    found, is_complete = source_files.folders_below(str(tmp_path))
    assert is_complete
    assert {os.path.relpath(path, tmp_path) for path in found} == {".", "a", "a/b", "a/again"}


def test_each_of_many_named_folders_counts(tmp_path: Path) -> None:
    folders = [tmp_path / f"scene {chr(65 + i)}" for i in range(24)]
    for folder in folders:
        folder.mkdir()
    sources = source_files.SourceFiles(list(map(str, folders)))
    (folders[-2] / "x.txt").touch()
    assert sources.changes() == [str(folders[-2] / "x.txt")]


@pytest.mark.slow
def test_a_cache_that_was_begun_with_few_samples_takes_all(
    folder: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Large(Rows):
        def __getitem__(self, i: int) -> torch.Tensor:
            return torch.full((512, 64), float((self.folder / f"{i}.txt").read_text()))

    for indices in (range(20), range(N)):
        kept(Large(folder), base, monkeypatch, indices=indices)
    assert samples_in(base) == N
