"""fsspec's filesystems: which are far, which a fork would break, and what becomes of a loader that has one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import stoker
from stoker.core.errors import StokerWarning
from stoker.core.filesystems import is_far, opened
from stoker.core.handles import held

fsspec = pytest.importorskip("fsspec")
asyn = pytest.importorskip("fsspec.asyn")
LIMIT_S = 60


class Remote(asyn.AsyncFileSystem):  # type: ignore[misc]
    """A server that answers with the name that it is asked for."""

    protocol = "remote"

    async def _cat_file(self, path: str, start: Any = None, end: Any = None, **more: Any) -> bytes:
        await asyncio.sleep(0.001)
        return path.encode()


class Rows(Dataset[Any]):
    def __init__(self, fs: Any = None) -> None:
        self.fs = fs

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> torch.Tensor:
        if self.fs is None:
            self.fs = Remote()
        return torch.tensor(list(self.fs.cat_file(f"{i:02}")))


EXPECTED = torch.tensor([list(f"{i:02}".encode()) for i in range(12)])


def test_what_is_far() -> None:
    assert is_far(Rows(Remote()))
    assert is_far({"urls": ["https://example.com/0.png"]})
    assert not is_far(Rows())
    assert not is_far(Rows(fsspec.filesystem("memory")))
    assert not is_far({"paths": ["photos/0.png", Path("x")], "n": 3})


def test_a_filesystem_is_no_handle_that_samples_share() -> None:
    assert held(Rows(Remote())) == ""
    assert held(Rows(fsspec.filesystem("memory"))) == ""


def test_what_a_fork_would_break() -> None:
    assert [path for path, _ in opened(Rows(Remote()))] == ["dataset.fs"]
    assert not list(opened(Rows(Remote(asynchronous=True))))
    assert not list(opened(Rows(fsspec.filesystem("memory"))))
    assert not list(opened(Rows()))


@pytest.mark.timeout(LIMIT_S)
def test_a_filesystem_that_a_worker_opens_needs_nothing() -> None:
    assert torch.equal(torch.cat(list(stoker.DataLoader(Rows(), batch_size=4, num_workers=2))), EXPECTED)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_workers_make_a_filesystem_anew_that_was_opened_before_the_fork() -> None:
    """torch's workers fail."""
    data = Rows(Remote())
    assert data[1].tolist() == EXPECTED[1].tolist()
    with pytest.raises(RuntimeError, match="fork-safe"):
        next(iter(DataLoader(data, num_workers=1, multiprocessing_context="fork")))
    loader = stoker.DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork")
    assert torch.equal(torch.cat(list(loader)), EXPECTED)
    assert data[1].tolist() == EXPECTED[1].tolist()
    assert loader.decisions == [
        "dataset.fs (Remote) was opened before the workers started, so each worker opens its own"
    ]


@pytest.mark.timeout(LIMIT_S)
def test_a_trial_makes_it_anew_too() -> None:
    assert stoker.split(Rows(Remote())).exact


class Hidden(Rows):
    """Its filesystem is a global variable."""

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor(list(GLOBAL[0].cat_file(f"{i:02}")))


GLOBAL: list[Any] = []


@pytest.mark.timeout(LIMIT_S)
def test_one_that_is_not_found_is_named_by_its_error() -> None:
    GLOBAL[:] = [Remote()]
    with pytest.raises(RuntimeError, match=r"not fork-safe\nAn fsspec filesystem was opened before"):
        next(iter(stoker.DataLoader(Hidden(), num_workers=1, multiprocessing_context="fork")))


class File(asyn.AbstractBufferedFile):  # type: ignore[misc]
    """An open file of a server: it asks the thread of the process that opened it."""

    def __init__(self, fs: Any, path: str) -> None:
        super().__init__(fs, path, size=24)
        self.loop = fs.loop

    def __reduce__(self) -> Any:
        return File, (self.fs, self.path)

    def _fetch_range(self, start: int, end: int) -> bytes:
        out: bytes = asyn.sync(self.loop, self.fs._cat_file, "".join(f"{i:02}" for i in range(12)))
        return out[start:end]


class FromFile(Rows):
    def __getitem__(self, i: int) -> torch.Tensor:
        self.fs.seek(2 * i)
        return torch.tensor(list(self.fs.read(2)))


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_a_file_opened_before_the_fork_gets_other_workers() -> None:
    """A forked worker would wait for ever."""
    data = FromFile(File(Remote(), "x"))
    loader = stoker.DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork")
    with pytest.warns(StokerWarning, match=r"dataset\.fs is an open fsspec File, .* started by forkserver"):
        assert torch.equal(torch.cat(list(loader)), EXPECTED)


@pytest.mark.timeout(LIMIT_S)
def test_where_no_other_workers_can_be_started_the_remedy_is_named() -> None:
    data = FromFile(File(Remote(), "x"))
    loader = stoker.DataLoader(data, num_workers=1, collate_fn=lambda x: x, multiprocessing_context="fork")
    with pytest.warns(StokerWarning, match=r"The worker will wait forever\. Open it in __getitem__"):
        it = iter(loader)
    it._shutdown_workers()
