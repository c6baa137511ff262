"""Datasets that make trouble for a cache: no source, side effects, memory that is reused, samples that are written to."""

from __future__ import annotations

import functools
import inspect
import io
import linecache
import logging
import multiprocessing
import os
import random
import socket
import socketserver
import sqlite3
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import stoker
from stoker.core.compare import equal_bits
from stoker.core.errors import StokerWarning, UsageError

N = 24


@pytest.fixture(autouse=True)
def cuts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are kept only where there is no cut, however fast this machine is."""
    monkeypatch.setattr("stoker.staging.trial.MEMO_SHARE", float("inf"))


TEXT = """
import torch
from torch.utils.data import Dataset

class Made(Dataset):
    random = True
    def __len__(self):
        return 24
    def __getitem__(self, i):
        x = torch.arange(8.0) + i
        x = x.exp().log()
        if self.random:
            x = x + torch.rand(())
        return x
"""


class Base(Dataset[Any]):
    def __len__(self) -> int:
        return N


def epochs(loader: Any, n: int = 3) -> list[Any]:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    return [list(loader) for _ in range(n)]


def same_epochs(make: Callable[[], Any], kept: bool = True, **settings: Any) -> stoker.Staged:
    """Batches with the cache are those of torch without, to the bit."""
    settings = {"batch_size": 4, "num_workers": 0, **settings}
    plain = epochs(torch.utils.data.DataLoader(make(), **settings))
    staged = stoker.Staged(make(), cache_budget="10MB")
    assert equal_bits(plain, epochs(torch.utils.data.DataLoader(staged, **settings)))
    assert bool(staged.account.filled) is kept
    return staged


def refused(data: Any) -> str:
    with pytest.raises(UsageError, match="cannot be split: ") as e:
        stoker.split(data)
    return str(e.value)


# -- source


def test_code_without_source_is_kept_where_nothing_in_it_is_random() -> None:
    names: dict[str, Any] = {"__name__": "made"}
    exec(TEXT, names)
    assert "__getitem__ (<string>:" in refused(names["Made"]())
    names["Made"].random = False
    assert stoker.split(names["Made"]()).exact


def test_a_notebooks_cells_are_cut() -> None:
    name = "<ipython-input-7-0123456789ab>"
    linecache.cache[name] = len(TEXT), None, TEXT.splitlines(True), name
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(TEXT, name, "exec"), names)
    found = stoker.split(names["Made"]())
    assert f"{name}:13" in str(found)
    same_epochs(names["Made"])


def test_a_file_that_changed_since_it_was_imported_is_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "changes.py"
    path.write_text(TEXT)
    names: dict[str, Any] = {"__name__": "changes"}
    exec(compile(TEXT, str(path), "exec"), names)
    path.write_text(TEXT.replace("x.exp().log()", "x.log().exp()"))
    assert "differs from the code that runs" in refused(names["Made"]())


def logged(fn: Any) -> Any:
    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return wrapper


class DecoratedTwice(Base):
    """The second part needs ``self``, which the decorators know as one of their arguments."""

    gain = 2.0

    def __init__(self) -> None:
        self.rng = np.random.default_rng(4)

    @torch.no_grad()
    @logged
    def __getitem__(self, i: int) -> Any:
        x = (torch.arange(8.0) + i).exp().log()
        return x * self.gain + self.rng.random()


class Generator(Base):
    def __getitem__(self, i: int) -> Any:
        yield torch.rand(())


class Native(Base):
    """Its code is C's."""

    # Since Python 3.14 a partial that is no staticmethod is bound, like a function.
    __getitem__ = staticmethod(functools.partial(lambda i: torch.arange(8.0) + i))


@pytest.mark.slow
def test_a_decorated_function_is_cut_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.staging.search.WORTH_S", 0.0)
    same_epochs(DecoratedTwice)
    found = stoker.split(DecoratedTwice())
    assert found.plan is not None
    assert found.plan.nbytes < 64
    assert "self.rng.random()" in found.rows[-1].name


def test_a_generator_function_says_why_not() -> None:
    assert "generator" in refused(Generator())


def test_what_is_no_function_is_kept_where_nothing_in_it_is_random() -> None:
    assert stoker.split(Native()).exact


# -- side effects


class Effects(Base):
    """Does something on the way, before anything random."""

    def __init__(self, effect: Callable[[int], Any]) -> None:
        self.effect = effect

    def __getitem__(self, i: int) -> Any:
        x = (torch.arange(8.0) + i).exp().log()
        self.effect(i)
        return x + torch.rand(())


@pytest.mark.slow
def test_a_trial_prints_and_logs_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    print("before", end="")  # stays in the buffer
    log = logging.getLogger("tests.odd")
    handler = logging.StreamHandler(sys.__stderr__)
    log.addHandler(handler)
    try:
        for effect in (print, lambda i: os.write(1, b"x"), log.warning):
            said = str(stoker.split(Effects(effect)))
            assert "prints or logs" in said
            assert "Effects.__getitem__" in said
    finally:
        log.removeHandler(handler)
    assert capfd.readouterr() == ("before", "")


def test_what_prints_prints_each_time(capfd: pytest.CaptureFixture[str]) -> None:
    staged = stoker.Staged(Effects(print), cache_budget="1MB")
    for _ in range(3):
        for i in range(N):
            staged[i]
    assert capfd.readouterr().out == "".join(f"{i}\n" for i in range(N)) * 3
    assert staged.account.filled >= N  # what comes before


@pytest.mark.slow
def test_a_trial_writes_no_file(tmp_path: Path) -> None:
    def native(i: int) -> None:
        torch._C.PyTorchFileWriter(str(tmp_path / f"{i}.pt"))

    effects: list[Callable[[int], Any]] = [
        lambda i: (tmp_path / f"{i}.txt").write_text("x"),
        lambda i: os.mkdir(tmp_path / str(i)),
        lambda i: os.remove(tmp_path / "kept"),
        lambda i: os.system(f"touch {tmp_path}/{i}"),
    ]
    (tmp_path / "kept").write_text("here")
    for effect in effects:
        assert "loading a sample" in refused(Effects(effect))
    if os.path.exists("/sys/kernel/security/landlock") or os.uname().release >= "6":
        refused(Effects(native))
        assert [p.name for p in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept").read_text() == "here"


@pytest.mark.slow
@pytest.mark.parametrize("flush", [False, True])
def test_a_trial_leaves_an_open_log_alone(tmp_path: Path, flush: bool) -> None:
    with open(tmp_path / "log", "a+") as log:
        log.write("begun\n")

        def effect(i: int) -> None:
            log.write(f"{i}\n")
            if flush:
                log.flush()

        data = Effects(effect)
        said = str(stoker.split(data))
        assert "prints or logs" in said or "writes to a file" in said
        staged = stoker.Staged(data, cache_budget="1MB")
        for _ in range(3):
            staged[3]
    assert (tmp_path / "log").read_text() == "begun\n" + "3\n" * 3


def test_a_trial_leaves_connections_alone() -> None:
    here, there = socket.socketpair()
    with here, there:
        there.setblocking(False)
        with pytest.raises(UsageError):
            stoker.split(Effects(lambda i: here.send(b"hello")))
        with pytest.raises(BlockingIOError):
            there.recv(10)


class Address(Base):
    """Asks a server for each sample."""

    def __init__(self, url: str, port: int) -> None:
        self.url, self.port = url, port

    def __getitem__(self, i: int) -> Any:
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(bytes([i]))
            return connection.recv(1)[0]


def test_a_trial_connects_only_where_the_dataset_names_servers() -> None:
    class Echo(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(self.request.recv(1))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        assert stoker.split(Address("http://127.0.0.1", port)).exact
        with pytest.raises(UsageError, match="loading a sample connects to a server"):
            stoker.split(Address("127.0.0.1", port))
        server.shutdown()


class Opened(Base):
    """Reads a record of a file that stays open, and a row of a database."""

    def __init__(self, file: Any, database: Any) -> None:
        self.file, self.database = file, database

    def __getitem__(self, i: int) -> Any:
        self.file.seek(8 * i)
        x = np.frombuffer(self.file.read(8), np.float64)
        (y,) = self.database.execute("select y from t where x = ?", (i,)).fetchone()
        return x + y + np.random.rand()


@pytest.mark.slow
def test_a_trial_leaves_open_files_and_databases_where_they_are(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(np.arange(float(N)).tobytes())
    database = sqlite3.connect(tmp_path / "y.db")
    database.execute("create table t (x integer, y real)")
    database.executemany("insert into t values (?, ?)", [(i, i / 2) for i in range(N)])
    database.commit()
    with open(tmp_path / "x", "rb") as file:
        file.seek(24)
        os.lseek(file.fileno(), 5, os.SEEK_SET)
        data = Opened(file, database)
        found = stoker.split(data)
        assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == 5
        assert not found.exact
        same_epochs(lambda: data)
    database.close()


def test_a_trial_leaves_shared_memory_alone() -> None:
    shared, value = torch.zeros(1).share_memory_(), multiprocessing.Value("i", 0)

    def count(i: int) -> None:
        value.value += 1

    for effect in (lambda i: shared.add_(1), count):
        assert "shared memory" in refused(Effects(effect))
    assert float(shared) == value.value == 0


# -- memory


class Reuses(Base):
    """One buffer for all samples."""

    def __init__(self) -> None:
        self.buffer = np.zeros(4)

    def __getitem__(self, i: int) -> Any:
        self.buffer[:] = i
        return self.buffer


_buffer = np.zeros(4)


class ReusesGlobal(Base):
    def __getitem__(self, i: int) -> Any:
        _buffer[:] = i
        return _buffer


class Rows(Base):
    """Hands out its own memory."""

    def __init__(self) -> None:
        self.rows = torch.arange(float(N * 4)).reshape(N, 4)
        self.labels = torch.arange(N)

    def __getitem__(self, i: int) -> Any:
        return self.rows[i], self.labels[i]


@pytest.mark.parametrize("make", [Reuses, ReusesGlobal])
def test_a_buffer_that_is_reused_is_no_sample(make: Any) -> None:
    assert "buffer[:]" in refused(make())


class Writes(Base):
    """Its random part writes to the dataset's own memory."""

    def __init__(self) -> None:
        self.rows = [np.arange(4.0) + i for i in range(N)]

    def __getitem__(self, i: int) -> Any:
        row, scale = self.find(i)
        row += np.random.rand()
        return row * scale

    def find(self, i: int) -> Any:
        return self.rows[i], float(np.exp(i))


class WritesNowAndThen(Writes):
    def __getitem__(self, i: int) -> Any:
        row, scale = self.find(i)
        if np.random.rand() < 0.15:
            row *= 2
        return row * scale + np.random.rand()


@pytest.mark.few(1)
@pytest.mark.parametrize("make", [Writes, WritesNowAndThen])
def test_a_random_part_that_writes_to_the_dataset_is_not_undone(make: Any) -> None:
    why = refused(make())
    assert "memory that the dataset owns" in why or "rows" in why


def doubled(samples: Any) -> Any:
    """Writes to the samples that it is given."""
    for x in samples:
        x[0] *= 2
    return torch.stack([x[0] for x in samples])


class Fresh(Base):
    def __init__(self, draws: bool = False) -> None:
        self.draws = draws

    def __getitem__(self, i: int) -> Any:
        x = (torch.arange(8.0) + i).exp().log()
        return [x + torch.rand(()) if self.draws else x, {"name": [i]}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loader", "settings", "draws"),
    [
        (stoker.DataLoader, {"collate_fn": doubled}, False),
        (stoker.DataLoader, {"batch_size": None}, True),
        (torch.utils.data.DataLoader, {"collate_fn": doubled}, True),
        (torch.utils.data.DataLoader, {"batch_size": None}, False),
    ],
    ids=["collate, whole", "one by one, cut", "torch, collate, cut", "torch, one by one, whole"],
)
def test_what_is_written_to_a_sample_stays_in_that_sample(loader: Any, settings: Any, draws: bool) -> None:
    def run(data: Any) -> list[Any]:
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        out = []
        for _ in range(3):
            for batch in loader(data, num_workers=0, **settings):
                x = batch if isinstance(batch, torch.Tensor) else batch[0]
                out.append(x.clone())
                x.zero_()
                if not isinstance(batch, torch.Tensor):
                    batch[1]["name"].append("seen")
                    assert len(batch[1]["name"]) == 2
        return out

    staged = stoker.Staged(Fresh(draws), cache_budget="1MB")
    assert equal_bits(run(Fresh(draws)), run(staged))
    assert staged.account.filled == N


@pytest.mark.slow
def test_samples_that_do_not_fit_are_made_each_time() -> None:
    data = Fresh(True)
    plain = epochs(torch.utils.data.DataLoader(data, 4))
    staged = stoker.Staged(data, cache_budget=1 << 10)
    assert equal_bits(plain, epochs(torch.utils.data.DataLoader(staged, 4)))


# -- what changes


class Grows(Fresh):
    n = N

    def __len__(self) -> int:
        return self.n


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_length_that_changes_begins_a_new_cache(workers: int) -> None:
    data = Grows()
    staged = stoker.Staged(data, cache_budget="1MB")
    list(stoker.DataLoader(staged, 4, num_workers=workers))
    data.n = N + 8
    with pytest.warns(
        StokerWarning, match="Cache discarded, the dataset changed: (n was 24 and is 32|its length changed)"
    ):
        batches = list(stoker.DataLoader(staged, 4, num_workers=workers))
    assert len(batches) == (N + 8) // 4


class Toggles(Fresh):
    """Progressive resizing: another size from the second epoch on."""

    size = 4

    def __getitem__(self, i: int) -> Any:
        x = (torch.arange(float(self.size)) + i).exp().log()
        return x + torch.rand(())


@pytest.mark.few(1)
@pytest.mark.parametrize("loader", [torch.utils.data.DataLoader, stoker.DataLoader])
def test_what_changes_between_epochs_is_never_served_stale(loader: Any) -> None:
    data = Toggles()
    loader = loader(stoker.Staged(data, cache_budget="1MB"), 4, num_workers=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for size in (4, 6, 6, 4, 9):
            data.size = size
            assert {x.shape[1] for x in loader} == {size}


class Resized(Base):
    """Another size in each epoch, under the name that Pillow's pictures have for theirs."""

    def __init__(self) -> None:
        self.size = 8
        self.whole = False  # what is before the cut reads the size

    def __getitem__(self, i: int) -> Any:
        from PIL import Image

        picture = Image.fromarray(np.full((64, 64, 3), i, np.uint8)).rotate(30).rotate(-30).convert("L")
        if self.whole and i > 4:  # not in the samples of the trial
            picture = picture.resize((self.size, self.size))
        x, y = random.randrange(8), random.randrange(8)
        return torch.from_numpy(np.array(picture.crop((x, y, x + 48, y + 48)).resize((self.size, self.size))))


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True])
def test_an_attribute_with_the_name_of_one_of_a_librarys_may_change_in_each_epoch(whole: bool) -> None:
    data = Resized()
    data.whole = whole
    staged = stoker.Staged(data, cache_budget="10MB")
    filled = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for epoch, size in enumerate((8, 12, 16, 24, 32, 8)):
            data.size = size
            batches = []
            for dataset in (staged, data):
                random.seed(epoch)
                batches.append(list(stoker.DataLoader(dataset, 4, num_workers=0)))
            assert equal_bits(*batches)
            filled.append(staged.account.filled)
    assert filled[2:] == [N] * 4
    plan = staged.split.plan  # since the second change of the size, and before the first line that may read it
    assert plan is not None
    assert plan.scratch == {"dataset[0].size"}
    assert plan.shown.endswith(str(inspect.getsourcelines(Resized.__getitem__)[1] + 4))


class FromFiles(Base):
    def __init__(self, folder: Path, noise: float) -> None:
        self.folder, self.noise = folder, noise

    def write(self, epoch: int) -> None:
        """What a script does that makes its labels anew with the model."""
        for i in range(N):
            np.save(self.folder / f"{i}.npy", np.full(4, float(epoch)))

    def __getitem__(self, i: int) -> Any:
        x = np.load(self.folder / f"{i}.npy")
        return x + self.noise * random.random() if self.noise else x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "settings"),
    [(0.0, {"num_workers": 0}), (0.5, {"num_workers": 2, "persistent_workers": True})],
    ids=["whole", "cut, workers that stay"],
)
def test_files_that_are_written_between_epochs_are_read_anew(
    noise: float, settings: dict[str, Any], tmp_path: Path
) -> None:
    data = FromFiles(tmp_path, noise)
    data.write(0)
    loader = stoker.DataLoader(stoker.Staged(data, cache_budget="1MB"), 4, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for epoch in (0, 0, 1, 1):
            data.write(epoch)
            assert {int(x.min()) for x in loader} == {int(x.max()) for x in loader} == {epoch}


@pytest.mark.slow
def test_a_change_after_which_nothing_can_be_kept_ends_no_script() -> None:
    class Turns(Base):
        late = False

        def __getitem__(self, i: int) -> Any:
            if self.late:
                return torch.rand(4)
            x = (torch.arange(4.0) + i).exp()
            return x + torch.rand(4)

    data = Turns()
    loader = stoker.DataLoader(stoker.Staged(data, cache_budget="1MB"), 4, num_workers=0)
    list(loader)
    data.late = True
    with pytest.warns(StokerWarning, match="Cache discarded, the dataset changed: late was False and is True"):
        assert all(float(x.max()) < 1 for x in loader)


# -- errors, warnings, breakpoints


class Complains(Base):
    """Warns and fails after the cut, and before it."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails

    def load(self, i: int) -> torch.Tensor:
        if self.fails == "before" and i == 5:
            raise ValueError(f"no sample {i}")
        return (torch.arange(8.0) + i).exp().log()

    def shift(self, x: torch.Tensor, by: float) -> torch.Tensor:
        warnings.warn("shifted", UserWarning, stacklevel=1)
        if self.fails == "after":
            return x[
                "a",
                by,
            ]
        return x + by

    def __getitem__(self, i: int) -> Any:
        x = self.load(i)
        return self.shift(x, random.random()), i


@pytest.mark.few(1)
@pytest.mark.parametrize("fails", ["before", "after"])
def test_tracebacks_are_those_of_the_users_code(fails: str) -> None:
    def text(data: Any) -> str:
        try:
            for _ in range(2):
                for i in range(N):
                    data[i]
        except Exception as e:
            frames = traceback.format_exception(type(e), e, e.__traceback__)
            first = next(k for k, line in enumerate(frames) if "in __getitem__" in line and __file__ in line)
            return "".join(line for line in frames[first:] if "/stoker/staging/" not in line)
        return ""

    data = Complains()
    staged = stoker.Staged(data, cache_budget="1MB")
    data.fails = fails
    staged._bind()  # the trial saw none of it
    plain = text(data)
    assert "in shift" in plain or "in load" in plain
    assert text(staged) == plain


def test_warnings_name_the_users_line() -> None:
    def said(data: Any) -> list[Any]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for i in [*range(N), *range(N)]:
                data[i]
        return [(str(w.message), w.filename, w.lineno) for w in found]

    staged = stoker.Staged(Complains(), cache_budget="1MB")
    assert said(Complains()) == said(staged)
    assert staged.account.filled == N


def test_breakpoints_stop_at_the_users_lines() -> None:
    def lines(data: Any, i: int) -> list[Any]:
        seen: list[Any] = []

        def trace(frame: types.FrameType, event: str, arg: Any) -> Any:
            if frame.f_code.co_filename == __file__ and frame.f_code.co_name != "lines":
                if event == "line" and (frame.f_code.co_name, frame.f_lineno) not in seen[-1:]:
                    seen.append((frame.f_code.co_name, frame.f_lineno))
                return trace
            return None

        sys.settrace(trace)
        try:
            data[i]
        finally:
            sys.settrace(None)
        return seen

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        staged = stoker.Staged(Complains(), cache_budget="1MB")
        plain = lines(Complains(), 3)
        assert lines(staged, 3)[-2:] == plain[-2:]  # makes it: both parts
        assert len([staged[i] for i in range(N)]) == N
        served = lines(staged, 3)
    assert set(served) <= set(plain)
    assert served == plain[plain.index(served[0]) :]


def test_a_buffer_of_bytes_comes_back_as_one() -> None:
    class Text(Base):
        def __getitem__(self, i: int) -> Any:
            file = io.StringIO(f"{i} lines")
            text = file.read()
            return text + str(random.random())

    same_epochs(Text, collate_fn=list)


def made_by(shift: float) -> Callable[[Any], Any]:
    """Functions of the same code, with other variables around it."""

    def change(x: torch.Tensor) -> torch.Tensor:
        y = (x + shift).exp().log()
        return y + torch.rand(())

    return change


class Alike(Base):
    def __init__(self) -> None:
        self.changes = [made_by(1.0), made_by(100.0)]

    def __getitem__(self, i: int) -> Any:
        x = torch.arange(8.0) + i
        change = self.changes[i == 5]
        return change(x)


@pytest.mark.slow
def test_functions_of_the_same_code_keep_their_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.staging.search.WORTH_S", 0.0)
    same_epochs(Alike)


class Notes:
    """As albumentations' transforms: what it did last is noted on it, and nobody reads it."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.params = {"shape": tuple(x.shape)}
        return x * len(self.params["shape"])


class Draws:
    """As MONAI's: whether it did anything is noted, under a name that others read of themselves."""

    def __init__(self) -> None:
        self._do_transform = True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self._do_transform = bool(torch.rand(()) < 0.5)
        return -x if self._do_transform else x


class Asks(Notes):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x) + getattr(self, "_do_transform", 0)


class Remembering:
    """Reads what it noted: another sample before makes it another one."""

    def __init__(self) -> None:
        self.last = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = x + self.last
        self.last = x.shape[-1]
        return out


class Noting(torch.utils.data.Dataset[Any]):
    def __init__(self, *transforms: Any) -> None:
        self.transforms = list(transforms)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> torch.Tensor:
        x = torch.full((1 + i % 3,), float(i)).cumsum(0)
        for t in self.transforms:
            x = t(x)
        return x


@pytest.mark.filterwarnings("error::stoker.core.errors.StokerWarning")
@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_what_transforms_note_and_never_read_is_no_change(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.staging.change_watch.CHECK_S", 0.0)  # it is looked at each batch
    monkeypatch.setattr("stoker.staging.change_watch.CHECK_SHARE", 0)

    def batches(dataset: Any) -> list[Any]:
        torch.manual_seed(3)
        loader = stoker.DataLoader(dataset, batch_size=4, num_workers=workers, collate_fn=list, shuffle=True)
        return [[[x.tolist() for x in batch] for batch in loader] for _ in range(3)]

    staged = stoker.Staged(Noting(Notes(), Asks(), Draws()), cache_budget="1MB")
    assert batches(staged) == batches(Noting(Notes(), Asks(), Draws()))
    assert staged.account.filled == 40


def test_what_a_transform_notes_and_reads_is_not_kept() -> None:
    try:
        found = stoker.split(Noting(Notes(), Remembering(), Draws()))
    except UsageError:
        return
    assert not any("Remembering" in row.name for row in found.rows if row.cached), str(found)
