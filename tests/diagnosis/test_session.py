"""``stoker.watch()``: the same report for a part of a script."""

from __future__ import annotations

import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data import dataloader as torch_loader

import stoker
from stoker.core.errors import UsageError
from stoker.workers import fetcher
from tests.commands.helpers import forked_stoker


class Slow(Dataset):
    def __len__(self) -> int:
        return 160

    def __getitem__(self, i: int) -> torch.Tensor:
        time.sleep(0.002)
        return torch.zeros(2)


def epoch(loader: DataLoader) -> None:
    for _ in loader:
        pass


@pytest.mark.slow
def test_what_is_iterated_in_between_is_seen(tmp_path: Path) -> None:
    before = DataLoader(Slow(), batch_size=8)
    with stoker.watch() as w:
        epoch(before)
        epoch(stoker.DataLoader(Slow(), batch_size=8, num_workers=1))
    epoch(before)
    assert w.report is not None
    early, late = w.report["loaders"]
    # It is named by its line if this process was watched before.
    assert early["name"].startswith(("DataLoader of Slow", "tests/diagnosis/test_session.py:"))
    assert early["batches"] == late["batches"] == 20
    assert late["settings"]["engine"] == "stoker"
    assert w.report["verdict"] == "input-bound"
    found = {(f["cause"], f["loader"]) for f in w.report["findings"]}
    assert ("main_process_loading", early["name"]) in found
    assert "main_process_loading" in str(w)
    w.save(tmp_path / "a.html")
    assert (tmp_path / "a.html").read_text().endswith("</html>\n")
    with stoker.watch() as again:
        epoch(before)
    assert again.report is not None
    assert [e["batches"] for e in again.report["loaders"]] == [20]


@pytest.mark.parametrize("cls", [DataLoader, stoker.DataLoader])
@pytest.mark.slow
def test_loaders_of_one_line_are_counted(cls: Any) -> None:
    def made() -> Any:
        return cls(Slow(), batch_size=80, num_workers=1)

    with stoker.watch() as w:
        for _ in range(3):
            epoch(made())
        both = [made(), made()]
        for loader in both * 2:
            epoch(loader)
    assert w.report is not None
    (seen,) = w.report["loaders"]
    assert (seen["epochs"], seen["made"], seen["at_once"]) == (7, 5, 2)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.few(1)
def test_epochs_that_were_left_and_what_came_between(workers: int) -> None:
    loader = stoker.DataLoader(Slow(), batch_size=8, num_workers=workers)
    spent = 0.0
    with stoker.watch() as w:
        for _ in range(3):
            next(iter(loader))
            began = time.perf_counter()
            sum(range(300_000))
            spent += time.perf_counter() - began
        epoch(loader)
        sum(range(300_000))  # after an epoch's end: nobody's
        next(it := iter(loader))
        next(it)
        epoch(loader)
    assert w.report is not None
    (seen,) = w.report["loaders"]
    assert (seen["epochs"], seen["ended"]) == (6, 2)
    assert spent <= seen["between_s"] <= spent + seen["wait_s"]


@pytest.mark.slow
def test_no_thread_of_it_stays() -> None:
    """A notebook watches again and again."""
    others = [t for t in threading.enumerate() if t.name == "stoker_sampler"]
    for cls in (DataLoader, stoker.DataLoader) * 2:
        loader = cls(Slow(), batch_size=8)
        with stoker.watch():
            epoch(loader)
            it = iter(loader)
            next(it)
            looking = [t for t in threading.enumerate() if t.name == "stoker_sampler" and t not in others]
            assert looking
        epoch(loader)
        next(it)
        for thread in looking:
            thread.join(60)
        assert not [t for t in threading.enumerate() if t.name == "stoker_sampler" and t not in others]
        assert not any(t.is_alive() for t in looking)


def test_one_at_a_time() -> None:
    with stoker.watch(), pytest.raises(UsageError, match="has not ended"):
        stoker.watch()
    w = stoker.watch().stop()
    assert w.stop() is w
    assert "no DataLoader" in str(w)


@pytest.mark.slow
def test_nested_abandoned_and_in_threads() -> None:
    import threading

    loader, inner = DataLoader(Slow(), batch_size=40), DataLoader(Slow(), batch_size=80, num_workers=1)
    with stoker.watch() as w:
        for _ in loader:
            for _ in inner:
                break
        t = threading.Thread(target=epoch, args=(loader,))
        t.start()
        t.join()
    assert w.report is not None
    assert sum(e["batches"] for e in w.report["loaders"]) == 4 + 4 + 4


@pytest.mark.slow
def test_under_stoker_run_the_whole_script_is_reported(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        textwrap.dedent("""
        import stoker
        from torch.utils.data import DataLoader
        loader = DataLoader(list(range(40)), batch_size=4)
        for x in loader: pass
        with stoker.watch() as w:
            for x in loader: pass
        for x in loader: pass
        print(sum(e["batches"] for e in w.report["loaders"]))
        """)
    )
    p = forked_stoker(tmp_path, "train.py")
    assert p.returncode == 0, p.stderr
    assert p.stdout == "20\n"
    assert '"batches": 30' in (tmp_path / "stoker-report.json").read_text()


def test_what_the_session_replaced_is_torchs_again() -> None:
    class Own(DataLoader):
        def __iter__(self) -> Any:
            return super().__iter__()

    fetchers = torch.utils.data._utils.fetch
    places: list[Any] = [DataLoader, Own, torch_loader._SingleProcessDataLoaderIter]
    places += [torch_loader._BaseDataLoaderIter, fetchers._MapDatasetFetcher, fetcher.BatchFetcher]
    before = [dict(vars(place)) for place in places]
    for _ in range(2):
        with stoker.watch() as w:
            loader = Own(range(8), batch_size=2)  # type: ignore[arg-type]
            assert len(list(loader)) == 4
        assert [dict(vars(place)) for place in places] == before
        assert w.report is not None
        assert w.report["loaders"][0]["batches"] == 4


def test_what_somebody_wrapped_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    with stoker.watch():
        start: Any = DataLoader.__iter__

        def __iter__(self: Any) -> Any:
            seen.append(self)
            return start(self)

        DataLoader.__iter__ = __iter__  # type: ignore[method-assign]
    try:
        loader = DataLoader(range(8), batch_size=2)  # type: ignore[arg-type]
        assert len(list(loader)) == 4
        with stoker.watch() as w:
            assert len(list(loader)) == 4
        assert seen == [loader, loader]
        assert w.report is not None
        (entry,) = w.report["loaders"]
        assert (entry["batches"], entry["epochs"]) == (4, 1)
    finally:
        DataLoader.__iter__ = start  # type: ignore[method-assign]


def test_what_it_is_as_text() -> None:
    class Printer:
        text = staticmethod(lambda words: shown.append(words))

    shown: list[str] = []
    loader: Any = DataLoader(range(8), batch_size=2)  # type: ignore[arg-type]
    with stoker.watch() as w:
        list(loader)
        assert repr(w) == "<stoker.watch(): watching; print() or stop() ends it>"
        list(loader)
    assert repr(w) == "<stoker.watch(): input-bound, 1 loaders; print() shows it>"
    w._repr_pretty_(Printer(), False)  # what IPython calls where no HTML is shown
    assert shown == [str(w)]
    assert w.report is not None
    assert w.report["loaders"][0]["batches"] == 8
