"""``stoker.install``: defaults for loaders that others make, what it leaves behind, and loaders that frameworks build
from a ``stoker.DataLoader``."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import stoker
from stoker.core.errors import StokerWarning, UsageError
from stoker.loader.loader_state import state_of
from stoker.staging import install


class Data(Dataset[torch.Tensor]):
    def __init__(self, bad: int = -1) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> torch.Tensor:
        if i == self.bad:
            raise ValueError(f"sample {i}")
        return torch.tensor(float(i))


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(8.0))


def engine_of(it: Any) -> str:
    """Whose iterator it is. It is exhausted: one of torch's that is found as garbage waits 5 s for its worker."""
    for _ in it:
        pass
    return str(type(it).__module__.partition(".")[0])


def values(loader: Any) -> list[float]:
    return [float(x) for batch in loader for x in batch]


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)  # where lists of bad samples are written
    stoker.DataLoader([0])  # stoker follows its own loaders from the first one on
    before = DataLoader._get_iterator
    yield
    assert DataLoader._get_iterator is before


# -------------------------------------------------------------------------------------------------- what is left behind


def test_what_install_found_is_there_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    found = DataLoader._get_iterator
    calls = []

    def mine(loader: Any) -> Any:
        calls.append(loader)
        return found(loader)

    monkeypatch.setattr(DataLoader, "_get_iterator", mine)
    loader: Any = DataLoader(Data(), num_workers=1)
    with stoker.installed():
        assert engine_of(iter(loader)) == "stoker"
    assert DataLoader._get_iterator is mine
    assert engine_of(iter(loader)) == "torch"
    assert calls == [loader]
    monkeypatch.undo()


def test_what_was_put_over_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    loader: Any = DataLoader(Data(), num_workers=1)
    monkeypatch.setattr(DataLoader, "_get_iterator", DataLoader._get_iterator)  # what is put back at the end
    stoker.install()
    under = DataLoader._get_iterator
    over = lambda loader: under(loader)  # noqa: E731
    DataLoader._get_iterator = over  # type: ignore[method-assign]
    assert engine_of(iter(loader)) == "stoker"
    stoker.uninstall()
    assert DataLoader._get_iterator is over
    assert engine_of(iter(loader)) == "torch"
    with stoker.installed():
        assert engine_of(iter(loader)) == "stoker"
    assert DataLoader._get_iterator is over
    monkeypatch.undo()


@pytest.mark.slow
def test_apply_stays_after_an_install_within_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        textwrap.dedent("""
        import stoker
        from torch.utils.data import DataLoader
        if __name__ == "__main__":
            loader = DataLoader(range(64), batch_size=4, num_workers=1)
            other = DataLoader(range(32), batch_size=4, num_workers=1)
            with stoker.installed():
                print(len(list(other)), type(iter(other)).__module__)
            print(len(list(loader)), type(iter(loader)).__module__)
        """)
    )
    line = [sys.executable, "-m", "stoker", "run", "--apply", "train.py"]
    p = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert p.stdout == "8 stoker.loader.pool_iterator\n16 stoker.loader.pool_iterator\n", p.stderr


def test_another_argument_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"install\(\) does not accept 'num_worker': stoker.DataLoader has no such"):
        stoker.install(num_worker=2)
    with pytest.raises(TypeError, match=r"does not accept 'batch_size': each loader has its own"):
        stoker.install(batch_size=2)
    with pytest.raises(UsageError, match=r"on_error must be .*, not 'no'"), stoker.installed(on_error="no"):
        pass
    with pytest.raises(UsageError, match="cache must be one of"):
        stoker.install(cache="no")
    with pytest.raises(ValueError, match="num_workers"):
        stoker.install(num_workers=-1)
    assert engine_of(iter(DataLoader(Data(), num_workers=1))) == "torch"  # nothing was installed


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_go_the_way_that_was_said(workers: int, tmp_path: Path) -> None:
    loader: Any = DataLoader(Data(bad=7), batch_size=4, num_workers=workers)
    with stoker.installed(on_error="skip", max_errors=3, quarantine=tmp_path / "bad.jsonl"):
        assert values(loader) == [float(i) for i in range(12) if i != 7]
    assert "ValueError" in (tmp_path / "bad.jsonl").read_text()
    it: Any = iter(loader)
    with pytest.raises(ValueError, match="sample 7"):
        values(it)
    if workers:
        it._shutdown_workers()  # as garbage, in a circle with its error, torch's iterator waits 5 s for its worker


def test_the_number_of_workers() -> None:
    loader: Any = DataLoader(Data(), batch_size=4)
    stream: Any = DataLoader(Stream(), num_workers=2)
    with stoker.installed(num_workers="auto"):
        it = iter(loader)
        assert [float(x) for b in it for x in b] == list(range(12))
        assert engine_of(it) == "stoker"
        assert state_of(loader).first_count_reason
        assert values(stream) == [float(i) for i in range(8) for _ in range(2)]  # it has as many parts as workers
        assert stream.num_workers == 2
    with stoker.installed(num_workers=2, prefetch_factor=3):
        loader = DataLoader(Data(), batch_size=4)
        assert len(iter(loader)._workers) == 2
        assert loader.prefetch_factor == 3
    loader = DataLoader(Data(), batch_size=4, num_workers=2, timeout=5, persistent_workers=True)
    with stoker.installed(num_workers=0):
        assert values(loader) == list(range(12))


def test_calls_nest_with_their_defaults() -> None:
    with stoker.installed(worker_method="thread", on_error="skip"):
        with stoker.installed(on_error="raise"):
            loader: Any = DataLoader(Data(bad=2), num_workers=1)
            with pytest.raises(ValueError, match="sample 2"):
                values(loader)
            assert loader.worker_method == "thread"
        assert len(values(DataLoader(Data(bad=2), num_workers=1))) == 11


def test_what_cannot_be_for_a_loader_is_said() -> None:
    with stoker.installed(on_error="skip"):
        loader: Any = DataLoader(Stream(), num_workers=1)
        with pytest.warns(StokerWarning, match=r"DataLoader of Stream: .*on_error='skip' needs a map-style dataset"):
            assert values(loader) == list(range(8))


def test_a_cache() -> None:
    data = Data()
    loader: Any = DataLoader(data, batch_size=4)
    with stoker.installed(cache="ram"):
        for _ in range(2):
            assert values(loader) == values(DataLoader(data, batch_size=3)) == list(range(12))
        assert loader.dataset is data
        ((_, staged),) = install._caches.values()
        assert staged.account.filled == 12
        assert values(DataLoader(Stream())) == list(range(8))
    assert not install._caches
    assert values(loader) == list(range(12))


@pytest.mark.parametrize("persistent", [False, True])
def test_a_device(persistent: bool) -> None:
    loader: Any = DataLoader(Data(), batch_size=4, num_workers=1, persistent_workers=persistent)
    with stoker.installed(device="cpu", transform_on_device=torch.neg):
        for _ in range(2):
            assert values(loader) == [-float(i) for i in range(12)]


# ------------------------------------------------------------------------------------------- built from a stoker.DataLoader


def built(loader: Any, cls: Any = DataLoader, dataset: Any = None) -> Any:
    """As Accelerate and Ray build it."""
    names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
    names = (*names, "generator", "prefetch_factor", "persistent_workers", "in_order")
    more = {name: getattr(loader, name) for name in names}
    return cls(loader.dataset if dataset is None else dataset, batch_sampler=loader.batch_sampler, **more)


def test_a_loader_built_from_its_attributes_keeps_engine_and_settings() -> None:
    ours: Any = stoker.DataLoader(Data(bad=5), batch_size=4, num_workers=1, on_error="skip", task_seeds=True)
    for loader in (built(ours), built(built(ours)), built(copy.copy(ours))):
        assert type(loader) is DataLoader
        it = iter(loader)
        assert values(it) == values(ours)
        assert engine_of(it) == "stoker"
        assert loader.task_seeds is True
    plain = built(stoker.DataLoader(Data(), batch_size=4))
    assert values(plain) == list(range(12))
    assert engine_of(iter(plain)) == "stoker"


def test_auto_stays_auto() -> None:
    loader = built(stoker.DataLoader(Data(), batch_size=4, num_workers="auto"))
    assert values(loader) == list(range(12))
    assert state_of(loader).first_count_reason


def test_a_loader_of_ones_own_with_the_same_number_is_torchs() -> None:
    ours: Any = stoker.DataLoader(Data(), batch_size=4, num_workers=1, on_error="skip")
    assert engine_of(iter(DataLoader(Data(), num_workers=ours.num_workers))) == "torch"


def test_the_number_is_a_number() -> None:
    ours: Any = stoker.DataLoader(Data(), num_workers=2)
    n = ours.num_workers
    assert (n, n + 1, repr(n), json.dumps(n), f"{n:>3}") == (2, 3, "2", "2", "  2")
    assert type(pickle.loads(pickle.dumps(n))) is int
    assert vars(ours)["num_workers"] == 2
    assert pickle.loads(pickle.dumps(ours)).num_workers == 2
    ours.num_workers = 3
    assert ours.num_workers == 3


def test_a_class_with_iterators_of_its_own_says_what_is_lost() -> None:
    class Stateful(DataLoader):  # type: ignore[type-arg]
        def _get_iterator(self) -> Any:
            return super()._get_iterator()

    Stateful.__module__ = Stateful._get_iterator.__module__ = "torchdata.stateful_dataloader.stateful_dataloader"
    ours: Any = stoker.DataLoader(Data(), batch_size=4, num_workers=1)
    with pytest.warns(
        StokerWarning, match=r"converted to a torchdata Stateful.*settings no longer apply.*already has state_dict\(\)"
    ):
        built(ours, Stateful)
