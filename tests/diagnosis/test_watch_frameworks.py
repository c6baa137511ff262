"""``stoker run`` on loaders as frameworks make and wrap them. The classes here have the shape of theirs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.commands.helpers import forked_stoker, python, report, script

DATA = """
    import copy, functools, pickle, threading
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Data(Dataset):
        def __len__(self):
            return 24
        def __getitem__(self, i):
            return torch.full((2,), float(i))
"""


def library(tmp_path: Path, name: str, body: str) -> dict[str, str]:
    """An installed package, and the environment in which it is one."""
    home = tmp_path / "packages"
    (home / f"{name}-1.0.dist-info").mkdir(parents=True)
    script(home, body, f"{name}.py")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(home), os.environ.get("PYTHONPATH", "")])}


# While the user's code makes loaders, __init__ of DataLoader and of every subclass is wrapped.
LIGHTNING = """
    import functools
    from torch.utils.data import DataLoader

    def subclasses(cls):
        return {cls}.union(*(subclasses(c) for c in cls.__subclasses__()))

    def wrapped(init):
        @functools.wraps(init)
        def wrapper(self, *args, **kwargs):
            init(self, *args, **kwargs)
        return wrapper

    def patched(make):
        classes = [c for c in subclasses(DataLoader) if "__init__" in vars(c)]
        for cls in classes:
            setattr(cls, "__old__init__", cls.__init__)
            cls.__init__ = wrapped(cls.__init__)
        try:
            loaders = make()
            again = type(loaders[0])(loaders[0].dataset, batch_size=4)   # with another sampler, say
            return [again, *loaders[1:]]
        finally:
            for cls in classes:
                cls.__init__ = vars(cls)["__old__init__"]
                delattr(cls, "__old__init__")
"""

WITH_LIGHTNING = (
    DATA
    + """
    from lightning_like import patched

    class Before(DataLoader):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)

    init = DataLoader.__init__
    def make():
        return [DataLoader(Data(), batch_size=4, num_workers=1), Before(Data(), batch_size=4)]   # LINE
    loaders = patched(make)
    assert DataLoader.__init__ is init

    class After(DataLoader):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)

    loaders += patched(lambda: [After(Data(), batch_size=4)])
    print([sum(float(b.sum()) for b in loader) for loader in loaders])
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--apply"]])
def test_init_is_wrapped_while_the_first_loader_is_made(tmp_path: Path, flags: list[str]) -> None:
    env = library(tmp_path, "lightning_like", LIGHTNING)
    p = forked_stoker(tmp_path, *flags, script(tmp_path, WITH_LIGHTNING), env=env)
    assert p.returncode == 0, p.stderr
    assert p.stdout == "[552.0, 552.0, 552.0]\n"
    line = next(i for i, t in enumerate((tmp_path / "train.py").read_text().splitlines(), 1) if "LINE" in t)
    found = {e["name"]: e for e in report(tmp_path)["loaders"]}
    assert sum(e["batches"] for e in found.values()) == 18
    assert f"train.py:{line}" in found  # the one that was built again, too
    assert all("lightning_like" not in name for name in found)


# Loaders as libraries and scripts make them. Each is read for two epochs, but for those that say otherwise.
SHAPES = (
    DATA
    + """
    from torch.utils.data import IterableDataset
    from torch.utils.data.dataloader import (
        _BaseDataLoaderIter, _DatasetKind, _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter
    )

    class RepeatSampler:                                     # timm, ultralytics
        def __init__(self, sampler):
            self.sampler = sampler
        def __iter__(self):
            while True:
                yield from iter(self.sampler)

    class MultiEpochs(DataLoader):                           # timm
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self._DataLoader__initialized = False
            self.batch_sampler = RepeatSampler(self.batch_sampler)
            self._DataLoader__initialized = True
            self.iterator = super().__iter__()
        def __len__(self):
            return len(self.batch_sampler.sampler)
        def __iter__(self):
            for i in range(len(self)):
                yield next(self.iterator)

    class Infinite(DataLoader):                              # ultralytics
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            object.__setattr__(self, "batch_sampler", RepeatSampler(self.batch_sampler))
            self.iterator = super().__iter__()
        def __len__(self):
            return len(self.batch_sampler.sampler)
        def __iter__(self):
            for _ in range(len(self)):
                yield next(self.iterator)
        def __del__(self):
            try:
                if not hasattr(self.iterator, "_workers"):
                    return
                for w in self.iterator._workers:
                    if w.is_alive():
                        w.terminate()
                self.iterator._shutdown_workers()
            except Exception:
                pass
        def reset(self):
            self.iterator = self._get_iterator()

    class OwnIter(_SingleProcessDataLoaderIter):
        def __next__(self):
            return super().__next__()
        def state_dict(self):
            return {"yielded": self._num_yielded}

    class Stateful(DataLoader):                              # torchdata: calls nothing of torch's
        def __init__(self, dataset, batch_size):
            self.__dict__.update(vars(DataLoader(dataset, batch_size)))
        def _get_iterator(self):
            return OwnIter(self)
        def __iter__(self):
            self._iterator = self._get_iterator()
            return self._iterator
        def state_dict(self):
            return self._iterator.state_dict()

    class Fake:                                              # fastai: no loader of torch's at all
        _IterableDataset_len_called, _auto_collation, drop_last, in_order = None, False, False, True
        _index_sampler, generator, prefetch_factor = [0] * 1000, None, 2
        timeout, pin_memory, pin_memory_device, persistent_workers = 0, False, "", False
        worker_init_fn, multiprocessing_context = None, None
        dataset_kind = _dataset_kind = _DatasetKind.Iterable
        def __init__(self, d, num_workers):
            self.dataset, self.d, self.num_workers = self, d, num_workers
        def collate_fn(self, x):
            return x
        def _get_shared_seed(self):
            return 0
        def __iter__(self):
            return iter(self.d.batches())

    class Fast:
        def __init__(self, dataset, bs, num_workers=0):
            self.dataset, self.bs = dataset, bs
            self.fake = Fake(self, num_workers)
        def batches(self):
            for i in range(0, len(self.dataset), self.bs):
                yield torch.stack([self.dataset[j] for j in range(i, i + self.bs)])
        def __iter__(self):
            kind = (_MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter)[self.fake.num_workers == 0]
            yield from kind(self.fake)

    class Around:                                            # PyG: its own iterator around torch's
        def __init__(self, it):
            self.it = it
        def __iter__(self):
            return self
        def _reset(self, loader, first_iter=False):
            self.it._reset(loader, first_iter)
        def __next__(self):
            return next(self.it) + 0

    class Nodes(DataLoader):
        def _get_iterator(self):
            return Around(super()._get_iterator())

    class Thread(DataLoader):                                # MONAI: another thread reads torch's iterator
        def __iter__(self):
            import queue
            batches = queue.Queue(1)
            def read():
                for b in DataLoader.__iter__(self):
                    batches.put(b)
                batches.put(None)
            threading.Thread(target=read, daemon=True).start()
            while (b := batches.get()) is not None:
                yield b

    class Returns(DataLoader):                               # a generator, but no generator function
        def __iter__(self):
            return (b + 0 for b in super().__iter__())

    class Later(DataLoader):                                 # nothing of torch's until it is read
        def __iter__(self):
            return map(lambda b: b + 0, iter(self._batches()))
        def _batches(self):
            yield from super().__iter__()

    class Itself(DataLoader):
        def __iter__(self):
            self.it = super().__iter__()
            return self
        def __next__(self):
            return next(self.it)

    class Generated(DataLoader):                             # _get_iterator gives a generator
        def _get_iterator(self):
            yield from super()._get_iterator()

    class Own(DataLoader):                                   # nothing of torch's
        def __iter__(self):
            for indices in self.batch_sampler:
                yield torch.stack([self.dataset[i] for i in indices])

    class Kept(DataLoader):                                  # nothing that could be watched
        def __iter__(self):
            return iter([torch.stack([self.dataset[i] for i in indices]) for indices in self.batch_sampler])

    class Delegates:
        def __init__(self, loader):
            self.loader = loader
        def __getattr__(self, name):
            return getattr(self.loader, name)
        def __iter__(self):
            return self.loader.__iter__()
        def __len__(self):
            return len(self.loader)

    def in_thread(loader):
        out = []
        t = threading.Thread(target=lambda: out.extend(loader))
        t.start()
        t.join()
        return out

    def pickled(loader):
        return pickle.loads(pickle.dumps(loader))

    def show(name, loader, epochs=2):
        for epoch in range(epochs):
            print(name, [float(b.sum()) for b in loader], flush=True)

    if __name__ == "__main__":
        base = dict(batch_size=4)
        show("stateful", Stateful(Data(), 4))
        show("multi", MultiEpochs(Data(), **base, num_workers=1))
        infinite = Infinite(Data(), **base, num_workers=1)
        show("infinite", infinite)
        infinite.reset()
        show("infinite", infinite, 1)
        del infinite
        show("fast0", Fast(Data(), 4))
        show("fast1", Fast(Data(), 4, 1))
        show("nodes", Nodes(Data(), **base, num_workers=1, persistent_workers=True))
        show("thread", Thread(Data(), **base, num_workers=1))
        show("returns", Returns(Data(), **base))
        show("later", Later(Data(), **base))
        show("itself", Itself(Data(), **base))
        show("generated", Generated(Data(), **base, num_workers=1))
        show("own", Own(Data(), **base))
        show("kept", Kept(Data(), **base))
        loader = DataLoader(Data(), **base, num_workers=1)   # PLAIN
        show("delegates", Delegates(loader))
        show("copied", copy.copy(loader))
        show("pickled", pickled(loader))
        show("threaded", in_thread(loader))
        show("deep", copy.deepcopy(loader))
        show("itself", pickled(Itself(Data(), **base)))
"""
)

# Class: epochs, whether the engine is there with --apply, and what is said where it is not.
EXPECTED = {
    "Stateful": (2, False, "its own iterator class, OwnIter"),
    "MultiEpochs": (2, True, ""),
    "Infinite": (3, True, ""),
    "Fast": (4, False, "__main__ uses torch's iterators without a DataLoader"),
    "Nodes": (2, True, ""),
    "Thread": (2, True, ""),
    "Returns": (2, True, ""),
    "Later": (2, True, ""),
    "Itself": (4, True, ""),
    "Generated": (2, True, ""),
    "Own": (2, False, "Own makes batches without torch's iterators"),
    "DataLoader": (9, True, ""),  # the thread reads one
}


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--apply"]])
def test_loaders_of_every_shape_are_seen(tmp_path: Path, flags: list[str]) -> None:
    path = script(tmp_path, SHAPES)
    plain = python(path)
    assert plain.returncode == 0, plain.stderr
    p = forked_stoker(tmp_path, *flags, path)
    assert p.returncode == 0, p.stderr
    assert p.stdout == plain.stdout
    found = report(tmp_path)
    why = {e["name"]: e for e in found["bypassing"]}
    seen = {}
    for e in found["loaders"]:
        cls = e["settings"]["class"]
        reason = why.get(e["name"], {}).get("reason", "")
        epochs, _, _, batches = seen.get(cls, (0, True, "", 0))
        seen[cls] = (epochs + e["epochs"], e["settings"]["engine"] == "stoker", reason, batches + e["batches"])
    for cls, (epochs, engine, reason) in EXPECTED.items():
        got = seen[cls]
        assert got[0] == epochs, (cls, got)
        assert got[1] is (engine and bool(flags)), (cls, got)
        assert got[2].endswith(reason), (cls, got)
        assert bool(got[2]) is bool(reason), (cls, got)
        assert got[3] == 6 * epochs, (cls, got)
    (kept,) = (e for e in why.values() if not e["seen"])
    assert kept["reason"] == "its class Kept makes batches without torch's iterators"
    assert "no DataLoader was iterated" not in p.stderr
    assert "does not reach this loader" in p.stderr


ALONE = (
    DATA
    + """
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    class Slow(Data):
        def __getitem__(self, i):
            x = sum(torch.full((2,), float(i)) for _ in range(200))
            return x + torch.rand(2)

    class OwnIter(_MultiProcessingDataLoaderIter):
        pass

    class Stateful(DataLoader):
        def _get_iterator(self):
            return OwnIter(self)

    if __name__ == "__main__":
        torch.manual_seed(0)
        loader = Stateful(Slow(), batch_size=4, num_workers=2, shuffle=True)
        for epoch in range(12):  # the trial may end late on a busy machine
            print([b.tolist() for b in loader])
"""
)


@pytest.mark.slow
def test_a_class_with_iterators_of_its_own_gets_the_cache(tmp_path: Path) -> None:
    """As torchdata's ``StatefulDataLoader``: workers and states are the class's, and samples are loaded once."""
    path = script(tmp_path, ALONE)
    p = forked_stoker(tmp_path, "--apply", path)
    assert p.returncode == 0, p.stderr
    plain = python(path)
    assert p.stdout == plain.stdout
    found = report(tmp_path)
    assert found["loaders"][0]["settings"]["engine"] == "torch"
    (applied,) = found["applied"]["settings"].values()
    assert applied["cache"]["filled"] == 24, applied


TRAINER = """
    from torch.utils.data import DataLoader

    class Trainer:
        def __init__(self, train, val):
            self.train_set, self.val_set = train, val
        def make(self, dataset):
            return DataLoader(dataset, batch_size=4)
        def get_train_dataloader(self):
            return self.make(self.train_set)
        def get_eval_dataloader(self):
            return self.make(self.val_set)
        def train(self):
            return [len(list(loader)) for loader in (self.get_train_dataloader(), self.get_eval_dataloader())]
"""


@pytest.mark.slow
def test_loaders_that_a_framework_makes_are_told_apart(tmp_path: Path) -> None:
    env = library(tmp_path, "trainer_like", TRAINER)
    body = """
    from trainer_like import Trainer
    print(Trainer(Data(), Data()).train())
    """
    p = forked_stoker(tmp_path, script(tmp_path, DATA + body), env=env)
    assert p.stdout == "[6, 6]\n", p.stderr
    line = 1 + (tmp_path / "train.py").read_text().splitlines().index("print(Trainer(Data(), Data()).train())")
    names = [e["name"] for e in report(tmp_path)["loaders"]]
    assert names == [f"train.py:{line} (get_train_dataloader)", f"train.py:{line} (get_eval_dataloader)"]
