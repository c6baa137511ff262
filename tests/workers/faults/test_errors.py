"""Errors that people can read: the sample, its file, the transform, the worker; their own frames; the type kept."""

from __future__ import annotations

import functools
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset, IterableDataset, Subset

import stoker
from stoker.core import packages
from stoker.workers.exceptions import Caught, explain, users_part
from tests.helpers import Compose

KINDS = [
    pytest.param({"num_workers": 2}, id="process"),
    pytest.param({"num_workers": 2, "worker_method": "thread"}, id="thread"),
    pytest.param({"num_workers": 2, "multiprocessing_context": "spawn"}, id="spawn", marks=pytest.mark.slow),
    pytest.param({"num_workers": 2, "on_error": "raise", "sample_timeout": 60}, id="watched"),
    pytest.param({"num_workers": 2, "pin_memory": True}, id="pinned", marks=pytest.mark.filterwarnings("ignore")),
]


class Odd(Exception):
    """Its constructor wants what nobody has later, and its text is made of it."""

    def __init__(self, code: int, path: str) -> None:
        self.code, self.path = code, path

    def __str__(self) -> str:
        return f"{self.path} says {self.code}"


class Dumb(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Named(Exception):
    message = "of this class"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Full(ValueError):
    """Holds what cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock, self.number = threading.Lock(), 3


def local() -> Exception:
    class Local(ValueError):
        pass

    return Local("nobody can import this")


def unicode() -> Exception:
    return UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")


def decode() -> Exception:
    try:
        json.loads("{")
    except ValueError as e:
        return e
    raise AssertionError


def group() -> Exception:
    return eval("ExceptionGroup")("several", [ValueError("one"), KeyError("two")])


class Break:
    def __init__(self, make: Callable[[], Exception], at: float) -> None:
        self.make, self.at = make, at

    def __call__(self, x: float) -> float:
        if x == self.at:
            raise self.make()
        return x


class Data(Dataset):
    def __init__(self, make: Callable[[], Exception] = lambda: ValueError("odd"), at: float = 7) -> None:
        self.transform = Compose(float, Break(make, at))
        self.samples = [(f"photos/{i}.jpg", 0) for i in range(20)]

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> float:
        return self.transform(i)


class Many(Data):
    def __getitems__(self, indices: list[int]) -> list[float]:
        return [self.transform(i) for i in indices]


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        yield from range(5)
        raise ValueError("dried up")


class NoStream(IterableDataset):
    def __iter__(self) -> Any:
        raise ValueError("no beginning")


def no_collate(batch: list[Any]) -> Any:
    raise ValueError("cannot be put together")


def no_init(worker: int) -> None:
    raise ValueError("no worker")


def error(dataset: Any, **settings: Any) -> BaseException:
    with pytest.raises(Exception) as e:  # noqa: PT011
        list(stoker.DataLoader(dataset, **{"batch_size": 4, **settings}))
    return e.value


MADE = [
    (functools.partial(ValueError, "odd"), ValueError, "ValueError: odd"),
    (functools.partial(Odd, 5, "a.jpg"), Odd, "a.jpg says 5"),
    (functools.partial(Named, "hm"), Named, "hm"),
    (functools.partial(Full, "full"), Full, "Full: full"),
    (functools.partial(KeyError, "k"), KeyError, "KeyError: 'k'"),
    (functools.partial(OSError, 5, "gone", "a.jpg"), OSError, "[Errno 5] gone: 'a.jpg'"),
    (functools.partial(Dumb), Dumb, "exception str() failed"),
    (unicode, UnicodeDecodeError, "invalid start byte"),
    (decode, json.JSONDecodeError, "Expecting property name"),
    (local, ValueError, "nobody can import this"),
]


def cases() -> list[Any]:
    """Each error once, and the first one from each kind of workers."""
    out = []
    for k, made in enumerate(MADE):
        for kind in KINDS if k == 0 else KINDS[:1]:
            name = f"{made[1].__name__}{k}-{kind.id}"
            out.append(pytest.param(*kind.values, *made, id=name, marks=kind.marks))
    return out


@pytest.mark.few(2)
@pytest.mark.parametrize(("kind", "make", "cls", "text"), cases())
def test_an_error_is_of_its_type_and_says_where(kind: Any, make: Any, cls: Any, text: str) -> None:
    found = error(Data(make), **kind)
    words = str(found)
    assert isinstance(found, cls)
    name = "Local" if make is local else cls.__name__
    assert words.startswith(
        f"Caught {name} in DataLoader worker {'thread' if 'worker_method' in kind else 'process'} 1.\n"
    )
    assert "\nOriginal Traceback (most recent call last):\n" in words
    assert text in words
    assert words.splitlines()[1] == "stoker: while loading sample 7 (photos/7.jpg), in the transform Break"
    assert text in words.rstrip().splitlines()[-1] or cls is Dumb  # as in torch's
    frames = [line for line in words.splitlines() if line.startswith('  File "')]
    assert __file__ in frames[0]
    assert not [f for f in frames if packages.PACKAGE in f or packages.torch() in f]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="there are none before Python 3.11")
def test_a_group_is_raised_whatever_its_constructor_wants() -> None:
    words = str(error(Data(group), num_workers=2))
    assert "ValueError: one" in words
    assert "KeyError: 'two'" in words


def test_attributes_come_along_where_they_can() -> None:
    found: Any = error(Data(functools.partial(Odd, 5, "a.jpg")), num_workers=1)
    assert (found.code, found.path) == (5, "a.jpg")
    assert isinstance(found, RuntimeError)  # what torch raises for such a type
    again = pickle.loads(pickle.dumps(found))
    assert isinstance(again, Odd)
    assert str(again) == str(found)
    full: Any = error(Data(functools.partial(Full, "full")), num_workers=1)
    assert full.number == 3


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS[1::-1])
def test_every_place_has_its_words(kind: Any) -> None:
    def second(dataset: Any, **settings: Any) -> str:
        return str(error(dataset, **kind, **settings)).splitlines()[1]

    assert second(Subset(Data(), [3, 7, 1])).endswith("while loading sample 1 (photos/7.jpg), in the transform Break")
    assert second(Data(), batch_size=None).endswith("while loading sample 7 (photos/7.jpg), in the transform Break")
    assert second(Many()).endswith("while loading samples 4, 5, 6, 7, in the transform Break")
    assert second(Stream()) == "stoker: while loading batch 1 of this worker"
    assert second(Data(at=-1), collate_fn=no_collate) == "stoker: while collating samples 0, 1, 2, 3"
    assert second(NoStream()).startswith("stoker: while loading batch 0 of this worker")
    assert "no worker" in str(error(Data(), worker_init_fn=no_init, **kind))
    staged = stoker.Staged(Data(), prepare=Break(functools.partial(ValueError, "odd"), 7.0), cache=None)
    assert "while loading sample 7 (photos/7.jpg)" in second(staged)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes are of Python 3.11")
def test_without_workers_it_is_a_note() -> None:
    found = error(Data(), num_workers=0)
    assert found.args == ("odd",)
    assert found.__notes__ == ["stoker: while loading sample 7 (photos/7.jpg), in the transform Break"]


def test_a_dataset_whose_attributes_fail_costs_no_words() -> None:
    class Bad(Data):
        @property
        def files(self) -> Any:
            raise RuntimeError("not now")

        def __repr__(self) -> str:
            raise RuntimeError("no")

    words = str(error(Bad(), num_workers=1))
    assert "odd" in words
    assert "not now" not in words


def test_nothing_but_engine_keeps_its_frames() -> None:
    with pytest.raises(AttributeError) as e:
        Caught.reraise(None)  # type: ignore[arg-type]
    own = e.value.__traceback__.tb_next
    assert users_part(own) is own
    assert explain(e.value, Data()) == ""


class Twice(Data):
    """Kills its worker, and raises when it is tried again."""

    def __init__(self, folder: Path) -> None:
        super().__init__(at=-1)
        self.killed = folder / "killed"

    def __getitem__(self, i: int) -> float:
        if i == 6:
            if not self.killed.exists():
                self.killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            raise Odd(i, "a.jpg")
        return super().__getitem__(i)


@pytest.mark.filterwarnings("ignore")
def test_after_a_death_the_sample_is_named_too(tmp_path: Path) -> None:
    words = str(error(Twice(tmp_path), num_workers=2))
    assert words.splitlines()[1] == "stoker: while loading sample 6 (photos/6.jpg)"


def test_the_loader_goes_on_after_an_error() -> None:
    it = iter(stoker.DataLoader(Data(functools.partial(Odd, 1, "b")), batch_size=4, num_workers=2))
    seen: list[Any] = []
    while True:
        try:
            seen.append(next(it).tolist())
        except StopIteration:
            break
        except Odd as e:
            seen.append(e.code)
    assert seen == [[0, 1, 2, 3], 1, [8, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19]]


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["num_workers=4", "num_workers=4, worker_method='thread'"])
def test_many_workers_that_fail_are_one_trace(tmp_path: Path, settings: str) -> None:
    (tmp_path / "train.py").write_text(
        textwrap.dedent(f"""
        import stoker
        class Data:
            def __len__(self): return 64
            def __getitem__(self, i): raise ValueError(f"broken {{i}}")
        if __name__ == "__main__":
            for batch in stoker.DataLoader(Data(), batch_size=1, {settings}):
                pass
        """)
    )
    p = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert p.returncode == 1
    assert p.stderr.count("Traceback (most recent call last)") == 2, p.stderr  # the loop's and the worker's
    assert p.stderr.count("ValueError: broken") == 1
    assert p.stderr.count("stoker: while loading sample 0\n") == 1
    assert p.stderr.rstrip().endswith("ValueError: broken 0")
    assert p.stdout == ""
