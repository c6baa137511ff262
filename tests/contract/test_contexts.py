"""fork, spawn and forkserver; dead, slow and unpicklable workers; install."""

from __future__ import annotations

import contextlib
import multiprocessing.context
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import stoker
import stoker.core.errors
from stoker.core.processes import starts_processes
from stoker.loader.torch_messages import torch_message

from . import datasets as d
from . import trace
from .test_same_batches import draw


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "context", "persistent"), [("augmented", "forkserver", False), ("dict", "spawn", True)]
)
def test_the_same_under_other_contexts(kind: str, context: str, persistent: bool) -> None:
    kw = {"batch_size": 3, "num_workers": 2, "multiprocessing_context": context, "shuffle": True}
    plan = {"seed": 5, "epochs": 2, "leave_after": 1, "ask_len": False, "limit": 30}

    def build() -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (d.Map(11, kind),), {**kw, "persistent_workers": persistent, "worker_init_fn": d.init_numpy}

    assert trace.run(stoker.DataLoader, build, plan) == trace.run(torch.utils.data.DataLoader, build, plan)


@pytest.mark.slow
def test_the_default_start_method_is_this_pythons() -> None:
    """Which is forkserver since Python 3.14: for torch's loader, and so for stoker's."""
    code = "import multiprocessing, torch, stoker; print(multiprocessing.get_start_method())"
    p = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert p.stdout.strip() == multiprocessing.get_all_start_methods()[0]


class Unpicklable(d.Map):
    def __init__(self) -> None:
        super().__init__(4, "tensor")
        self.transform = [str, {"inner": lambda x: x}]


def test_what_cannot_be_pickled_is_named() -> None:
    hint = torch_message(_MultiProcessingDataLoaderIter.__init__, "Got pickle error")  # "" in older versions
    with (
        pytest.warns(UserWarning, match="pickle error") if hint else contextlib.nullcontext(),
        pytest.raises((AttributeError, pickle.PicklingError, TypeError)) as e,
    ):
        iter(stoker.DataLoader(Unpicklable(), num_workers=1, multiprocessing_context="spawn"))
    assert "dataset.transform[1]['inner']" in str(e.value)


class Deadly(d.Map):
    """Its worker dies at sample ``at``: by a signal, or by leaving with an exit code."""

    def __init__(self, how: str | int, at: int) -> None:
        super().__init__(40, "tensor")
        self.how, self.at = how, at

    def __getitem__(self, i: Any) -> Any:
        if i == self.at:
            if isinstance(self.how, int):
                os._exit(self.how)
            os.kill(os.getpid(), getattr(signal, self.how))
        return super().__getitem__(i)


@pytest.mark.parametrize(
    ("how", "at", "kw"),
    [
        (0, 39, {"in_order": False}),
        ("SIGKILL", 39, {}),
        (3, 0, {"persistent_workers": True}),
        ("SIGSEGV", 7, {"in_order": False}),
        (0, 7, {}),
    ],
)
@pytest.mark.few(2)
def test_a_dead_worker_is_an_error_and_no_hang(how: str | int, at: int, kw: dict[str, Any]) -> None:
    """When the last sample kills, the workers have been told already that no more will come."""
    loader = stoker.DataLoader(Deadly(how, at), batch_size=2, num_workers=2, **kw)
    with pytest.raises(
        RuntimeError, match=r"DataLoader worker \(pid(\(s\))? \d+.*\) (exited unexpectedly|is killed by signal)"
    ):
        list(loader)


def test_a_dead_worker_is_an_error_in_any_thread() -> None:
    """Where torch's SIGCHLD handler does not reach."""
    caught: list[BaseException] = []

    def consume() -> None:
        try:
            list(stoker.DataLoader(Deadly(0, 39), batch_size=2, num_workers=2))
        except BaseException as e:
            caught.append(e)

    thread = threading.Thread(target=consume)
    thread.start()
    thread.join(60)
    assert "exited unexpectedly" in str(caught[0])


class Slow(d.Map):
    def __getitem__(self, i: Any) -> Any:
        time.sleep(2 if i == 4 else 0)  # no longer: its worker is waited for
        return super().__getitem__(i)


@pytest.mark.slow
def test_the_timeout_is_torchs() -> None:
    loader = stoker.DataLoader(Slow(8, "tensor"), batch_size=2, num_workers=2, timeout=0.5)
    it = iter(loader)
    next(it), next(it)
    with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0\.5 seconds"):
        next(it)


def test_install_is_for_torchs_own_class() -> None:
    before = torch.utils.data.DataLoader._get_iterator
    with stoker.installed():
        with stoker.installed():
            loader = torch.utils.data.DataLoader(d.Map(9, "dict"), batch_size=2, num_workers=2)
            assert type(iter(loader)).__module__ == "stoker.loader.pool_iterator"
        assert type(iter(loader)).__module__ == "stoker.loader.pool_iterator"
    assert torch.utils.data.DataLoader._get_iterator is before
    assert type(iter(loader)).__module__ == "torch.utils.data.dataloader"
    stoker.uninstall()
    assert torch.utils.data.DataLoader._get_iterator is before


@pytest.mark.parametrize("i", range(10))
@pytest.mark.few(1)
def test_the_same_when_installed(i: int) -> None:
    """The drawn comparison again, torch's class against itself with stoker behind it."""
    build, plan, words = draw(random.Random(f"installed/{i}"))
    with stoker.installed():
        ours = trace.run(torch.utils.data.DataLoader, build, plan)
    assert ours == trace.run(torch.utils.data.DataLoader, build, plan), words


def augmented(workers: Any, seed: int = 3, epochs: int = 2, **kw: Any) -> list[Any]:
    torch.manual_seed(seed)
    loader = stoker.DataLoader(d.Map(40, "augmented"), batch_size=4, shuffle=True, num_workers="auto", **kw)
    if workers is not None:
        from stoker.core.options import AutoWorkers
        from stoker.loader.loader_state import state_of

        state_of(loader).first_count_reason = "the test's"
        loader.num_workers = AutoWorkers(workers)
    return [[trace.canon(b) for b in loader] for _ in range(epochs)]


@pytest.mark.slow
def test_auto_gives_the_same_bits_whatever_the_count() -> None:
    one = augmented(1)
    assert one[0] != one[1]
    for workers in (2, 5, None):
        assert augmented(workers) == one
    many = augmented(3, persistent_workers=True)
    assert many[0] == one[0]
    assert many == augmented(1, persistent_workers=True)


def test_auto_leaves_the_random_state_and_the_order_alone() -> None:
    def order(workers: Any) -> Any:
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        loader = stoker.DataLoader(d.Map(40, "int"), batch_size=4, shuffle=True, num_workers=workers)
        out = [b.tolist() for b in loader]
        return out, trace.random_state(None)

    assert order("auto") == order(2)
    assert order("auto") == order(0)


NUMPY_LATER = """
import torch, stoker
class Drawn(torch.utils.data.Dataset):
    def __len__(self): return 12
    def __getitem__(self, i):
        import numpy as np
        return i, np.random.randint(1000)
for loader_class in (stoker.DataLoader, torch.utils.data.DataLoader):
    torch.manual_seed(1)
    print([b[1].tolist() for b in loader_class(Drawn(), batch_size=4, num_workers=2, multiprocessing_context="fork")])
"""


@pytest.mark.slow
def test_numpy_is_seeded_when_a_worker_loads_it() -> None:
    done = subprocess.run([sys.executable, "-c", NUMPY_LATER], capture_output=True, text=True, timeout=60, check=True)
    ours, theirs = done.stdout.splitlines()
    assert ours == theirs


THREADS = """
import queue, signal, sys, threading
from multiprocessing.context import SpawnContext
import torch, torch.utils.data, stoker

class Worker(threading.Thread):
    pid = property(id)
    def run(self):
        try:
            super().run()
        finally:
            torch.utils.data._utils.worker._worker_info = None

class Queue(queue.Queue):
    def close(self): pass
    def cancel_join_thread(self): pass

class Threads(SpawnContext):  # as MONAI's ThreadDataLoader(use_thread_workers=True) has it
    _name = {name!r}
    Process, Queue = Worker, Queue

if __name__ == "__main__":
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    data = torch.utils.data.TensorDataset(torch.arange(24))
    stoker.install()
    for loader in (torch.utils.data.DataLoader, stoker.DataLoader):
        batches = loader(data, batch_size=4, num_workers=2, multiprocessing_context=Threads())
        print(sum(int(x.sum()) for (x,) in batches), type(iter(batches)).__name__)
    assert handlers == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    try:
        batches.state_dict()
    except stoker.StokerError as e:
        print("StateError:", e)
    assert threading.active_count() == 1, threading.enumerate()  # no iterator is kept alive
    print("still here")
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["processthread", "spawn"])
def test_a_context_whose_workers_are_no_processes_gets_torchs_own_iterator(name: str) -> None:
    """A worker of stoker's ends its process and sets its signals, which would be the script's."""
    out = subprocess.run([sys.executable, "-c", THREADS.format(name=name)], capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr
    assert out.stdout.splitlines() == [
        "276 _MultiProcessingDataLoaderIter",
        "276 _MultiProcessingDataLoaderIter",
        "StateError: this loader's position cannot be saved: multiprocessing_context=Threads does not start processes by "
        "fork, spawn or forkserver, so torch's own iterator serves this loader",
        "still here",
    ]


class OtherContext(multiprocessing.context.SpawnContext):
    _name = "threads"
    Process = threading.Thread  # type: ignore[assignment]


@pytest.mark.parametrize(
    "settings",
    [
        {"on_error": "skip"},
        {"sample_timeout": 1.0},
        {"on_worker_death": "restart"},
        {"task_seeds": True},
        {"budget": "10 MB"},
        {"num_workers": "auto"},
    ],
)
def test_what_torchs_own_iterator_cannot_do_is_an_error(settings: dict[str, Any]) -> None:
    kw: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": OtherContext(), **settings}
    with pytest.raises(stoker.core.errors.UsageError, match="does not start processes") as e:
        stoker.DataLoader(d.Map(4, "tensor"), **kw)
    assert next(iter(settings)) in str(e.value)


def test_every_context_of_multiprocessing_starts_processes() -> None:
    for method in ("fork", "spawn", "forkserver", None):
        assert starts_processes(multiprocessing.get_context(method))
    assert starts_processes(torch.multiprocessing)
    assert not starts_processes(OtherContext())


class Open(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Says when its iterator is closed."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __iter__(self) -> Any:
        worker = torch.utils.data.get_worker_info()
        assert worker is not None
        try:
            yield from range(100)
        finally:
            _note(self.folder, f"closed {worker.id}")


class Mortal(d.Map):
    """Says when it is destroyed in a process that is not the one it was made in."""

    def __init__(self, folder: str) -> None:
        super().__init__(100, "int")
        self.folder, self.maker = folder, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.maker:
            _note(self.folder, f"destroyed {torch.utils.data.get_worker_info() is None}")


def _note(folder: str, text: str) -> None:
    with open(os.path.join(folder, f"{text} {os.getpid()}"), "w"):
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "context", "early"),
    [
        (Open, "fork", True),
        (Mortal, "fork", False),
        (Open, "forkserver", False),
        (Mortal, "forkserver", True),
    ],
)
def test_what_a_worker_has_is_released_when_torch_releases_it(
    kind: type[Any], context: str, early: bool, tmp_path: Path
) -> None:
    """A generator's ``finally`` runs in a worker that ends. So does ``__del__`` of a dataset since torch 2.14, except
    under fork, where the dataset is a copy of the parent's."""

    def notes(cls: type[Any], folder: Path) -> list[str]:
        folder.mkdir()
        loader = cls(kind(str(folder)), batch_size=5, num_workers=2, multiprocessing_context=context)
        it = iter(loader)
        for _ in range(3):
            next(it)
        if not early:
            for _ in it:
                pass
        it._shutdown_workers()
        del it
        return sorted(path.name.rpartition(" ")[0] for path in folder.iterdir())

    ours = notes(stoker.DataLoader, tmp_path / "stoker")
    for attempt in range(5):  # see _aborts_at_exit
        try:
            theirs = notes(torch.utils.data.DataLoader, tmp_path / f"torch {attempt}")
            break
        except RuntimeError as e:
            if not _aborts_at_exit(e):
                raise
    else:
        pytest.fail("torch's workers aborted five times")
    assert ours == theirs
    if kind is Open:
        assert ours == ["closed 0", "closed 1"]


def _aborts_at_exit(e: RuntimeError) -> bool:
    """torch's workers end beside their queue's daemon thread. Where that thread is in C++ when the interpreter ends,
    Python ends the thread, which C++ answers with ``terminate called without an active exception``. Seen once with
    torch's own loader on a busy machine."""
    return "killed by signal: Aborted" in str(e)
