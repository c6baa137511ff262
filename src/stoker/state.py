"""Where a run is, as a state dict: what it holds, how it is checked, and random state in few bytes.

Nothing here is ever unpickled, and no more than a few kilobytes are kept whatever the dataset's length. The keys are
always the same and each value is a plain one (or what a user's own ``state_dict()`` gave), so that ``torch.save``, JSON
and ``torch.distributed.checkpoint``, which wants a template of the same form, all take it.
"""

from __future__ import annotations

import base64
import binascii
import json
import pickle
import random
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from .errors import StateError

VERSION = 1
RNG_BYTES = 1 << 16  # of one generator; a state dict that unpacks to more is none of ours
MAX_INT = 1 << 63
MAX_WORKERS = 1 << 16


@dataclass(frozen=True)
class Part:
    """What one worker did, where samples or the dataset's own state belong to a worker.

    Attributes:
        count: batches delivered of it.
        at: how many of them it had made when ``state`` was taken; -1: at the end of the epoch before.
        state: ``stage.state_of``; None where neither is stateful.
    """

    count: int
    at: int = 0
    state: Any = None


@dataclass(frozen=True)
class State:
    """A loader's place in its run.

    Attributes:
        kind: "map" or "iterable".
        epoch: of the workers' life, for task seeds: 0 unless workers persist.
        next: the first task that has not been delivered.
        ahead: tasks behind it that were delivered already (``in_order=False``).
        samples: indices that the tasks before ``next`` took from the sampler.
        finished: the epoch is over; the next one is to begin.
        lives_on: the dataset's copies outlive an epoch: no workers, or persistent ones.
        workers: how many worked; 0 for none.
        task_seeds: random state is set per task.
        base_seed, shared_seed: torch's.
        length: of the sampler's data, where the order depends on it; else -1.
        sampler: the order's name, or how the sampler is put back.
        sampler_rng: random state where its order was drawn, by generator.
        sampler_state: its own, and how many tasks it had given then.
        world: of a distributed sampler: samples taken by all ranks before this split, ranks, and its epoch.
        generator: random state of the loader's generator.
        torch_rng: of torch's global one, where epochs are drawn from that.
        parts: by worker.
        turn: whose batch of an iterable dataset comes next.
        len_called: torch's, for its warning.
        batch_size: None where stoker does not know it.
    """

    kind: str
    epoch: int
    next: int
    ahead: tuple[int, ...]
    samples: int
    finished: bool
    lives_on: bool
    workers: int
    task_seeds: bool
    base_seed: int
    shared_seed: int | None
    length: int
    sampler: str
    sampler_rng: dict[str, str]
    sampler_state: Any
    world: tuple[int, int, int] | None
    generator: str | None
    torch_rng: str | None
    parts: tuple[Part, ...]
    turn: int
    len_called: int | None
    batch_size: int | None

    def to_dict(self) -> dict[str, Any]:
        """The state dict."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["ahead"] = list(self.ahead)
        values["world"] = None if self.world is None else list(self.world)
        values["sampler_rng"] = json.dumps(self.sampler_rng)
        values["sampler_state"] = _packed(self.sampler_state)
        values["parts"] = _packed([{"count": p.count, "at": p.at, "state": p.state} for p in self.parts])
        return {"stoker": VERSION, **values}

    @classmethod
    def from_dict(cls, d: Any) -> State:
        """The state that ``to_dict`` wrote.

        Raises:
            StateError: anything else; the message says what is wrong with it.
        """
        if not isinstance(d, dict):
            raise StateError(f"a state dict is a dict, not {_short(d)}")
        version = d.get("stoker")
        if version is None:
            ours = " It looks like torchdata's." if "_snapshot" in d or "_num_yielded" in d else ""
            raise StateError(f"no state dict of a stoker.DataLoader: it has no key 'stoker'.{ours}")
        if type(version) is not int or version < 1:
            raise StateError(f"a state dict's version is a whole number, not {_short(version)}")
        if version > VERSION:
            raise StateError(f"the state dict has version {version}, this stoker reads up to {VERSION}: a newer stoker")
        names = {f.name for f in fields(cls)}
        for what, keys in (("lacks", names - set(d)), ("has no place for", set(d) - names - {"stoker"})):
            if keys:
                raise StateError(f"a state dict of version {version} {what} {', '.join(sorted(map(_short, keys)))}")
        return cls(**{name: _read(name, d[name]) for name in names})._consistent()

    def _consistent(self) -> State:
        if any(t <= self.next for t in self.ahead):
            raise StateError(f"ahead={_short(list(self.ahead))} has tasks that next={self.next} has passed")
        if len(self.parts) not in ({max(1, self.workers)} if self.kind == "iterable" else {0, 1, self.workers}):
            raise StateError(f"{len(self.parts)} parts of {self.workers} workers over a dataset that is {self.kind}")
        if self.sampler == "distributed" and self.world is None:
            raise StateError("world is None, and the sampler is distributed")
        return self


# -- checks, one a key


def _short(value: Any) -> str:
    try:
        words = repr(value)
    except Exception:
        return f"a {type(value).__name__}"
    return words if len(words) <= 60 else f"{words[:57]}..."


def _whole(least: int, most: int = MAX_INT) -> Callable[[Any], int]:
    def check(v: Any) -> int:
        if type(v) is not int or not least <= v < most:
            raise ValueError(f"a whole number, {least:,} to {most - 1:,}")
        return v

    return check


def _word(*words: str) -> Callable[[Any], str]:
    def check(v: Any) -> str:
        if not isinstance(v, str) or v not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return v

    return check


def _name(v: Any) -> str:
    if not isinstance(v, str) or len(v) > 100:
        raise ValueError("an order's name")
    return v


def _flag(v: Any) -> bool:
    if type(v) is not bool:
        raise ValueError("True or False")
    return v


def _rng(v: Any) -> str:
    if not isinstance(v, str):
        raise ValueError("random state as text")
    unpacked(v)
    return v


def _cpu_rng(v: Any) -> str:
    restore(torch.Generator(), _rng(v))
    return str(v)


def _or_none(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda v: None if v is None else check(v)


def _numbers(v: Any) -> tuple[int, ...]:
    if not isinstance(v, (list, tuple)) or len(v) > 1 << 20:
        raise ValueError("a list of whole numbers")
    return tuple(sorted({_whole(0)(x) for x in v}))


def _world(v: Any) -> tuple[int, int, int]:
    if not isinstance(v, (list, tuple)) or len(v) != 3:
        raise ValueError("three whole numbers")
    return _whole(0)(v[0]), _whole(1)(v[1]), _whole(-MAX_INT)(v[2])


def _rngs(v: Any) -> dict[str, str]:
    found = _json(v)
    if not isinstance(found, dict) or not set(found) <= set(_SET) | {"generator", "before"}:
        raise ValueError("random states by generator")
    return {name: _rngs(json.dumps(s)) if name == "before" else _rng(s) for name, s in found.items()}  # type: ignore[misc]


_OF_DATASET = {"dataset", "iterator", "ended"}


def _parts(v: Any) -> tuple[Part, ...]:
    found = _unpacked(v)
    if not isinstance(found, list) or len(found) > MAX_WORKERS:
        raise ValueError("a list of parts")
    parts = []
    for p in found:
        if not isinstance(p, dict) or set(p) != {"count", "at", "state"}:
            raise ValueError("parts with count, at and state")
        part = Part(_whole(0)(p["count"]), _whole(-1)(p["at"]), p["state"])
        if part.at > part.count:
            raise ValueError("parts whose at is at most their count")
        if part.state is not None and (not isinstance(part.state, dict) or set(part.state) != _OF_DATASET):
            raise ValueError("parts whose state has dataset, iterator and ended")
        parts.append(part)
    return tuple(parts)


def _sampler_state(v: Any) -> Any:
    found = _unpacked(v)
    if found is None:
        return None
    if not isinstance(found, dict) or set(found) != {"given", "sampler", "iterator", "ended"}:
        raise ValueError("a sampler's state with given, sampler, iterator and ended")
    _whole(0)(found["given"])
    _flag(found["ended"])
    return found


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "kind": _word("map", "iterable"),
    "epoch": _whole(0),
    "next": _whole(0),
    "ahead": _numbers,
    "samples": _whole(0),
    "finished": _flag,
    "lives_on": _flag,
    "workers": _whole(0, MAX_WORKERS),
    "task_seeds": _flag,
    "base_seed": _whole(-MAX_INT),
    "shared_seed": _or_none(_whole(-MAX_INT)),
    "length": _whole(-1),
    "sampler": _name,
    "sampler_rng": _rngs,
    "sampler_state": _sampler_state,
    "world": _or_none(_world),
    "generator": _or_none(_rng),
    "torch_rng": _or_none(_cpu_rng),
    "parts": _parts,
    "turn": _whole(0),
    "len_called": _or_none(_whole(0)),
    "batch_size": _or_none(_whole(1)),
}


def _read(name: str, value: Any) -> Any:
    try:
        return _CHECKS[name](value)
    except (ValueError, RecursionError) as e:
        raise StateError(f"{name}={_short(value)} in a state dict: {e}") from None


def _packed(value: Any) -> Any:
    """As JSON if it comes back as it was, else itself."""
    try:
        text = json.dumps(value)
        if alike(json.loads(text), value):
            return text
    except (TypeError, ValueError, RecursionError):
        pass
    return value


def _unpacked(value: Any) -> Any:
    return _json(value) if isinstance(value, str) else value


def _json(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("JSON")
    return json.loads(value)  # json.JSONDecodeError is a ValueError


def alike(a: Any, b: Any) -> bool:
    """Whether two values are the same, types included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(k in b and alike(v, b[k]) for k, v in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    try:
        return bool(a == b)
    except Exception:
        return False


# -- stateful objects


def is_stateful(obj: Any) -> bool:
    """Whether an object follows the protocol: ``state_dict()`` and ``load_state_dict(state)``."""
    return callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None))


def taken(obj: Any) -> Any:
    """An object's state as it is now, which later changes do not reach; None if it has none."""
    if not is_stateful(obj):
        return None
    return pickle.loads(pickle.dumps(obj.state_dict()))  # a copy, made and read here


def put(obj: Any, state: Any, name: str) -> None:
    """Gives an object its state.

    Raises:
        StateError: it has none, or does not take this one.
    """
    if state is None:
        return
    if not is_stateful(obj):
        raise StateError(
            f"the state dict has a state for the {name}, but {type(obj).__name__} has no load_state_dict()"
        )
    try:
        obj.load_state_dict(state)
    except Exception as e:
        words = f"{type(e).__name__}: {e}"
        raise StateError(f"the {name}'s own load_state_dict() does not take its state: {words}") from e


# -- random state


def packed(state: torch.Tensor) -> str:
    """A generator's state as text: 3.3 KB for torch's CPU generator, of whose 5,056 bytes half are zero."""
    return _text(bytes(state.numpy().tobytes()))


def _text(raw: bytes) -> str:
    """Bytes of the same significance together, because half of torch's words are always zero."""
    if len(raw) % 8 == 0:
        raw = np.frombuffer(raw, np.uint8).reshape(-1, 8).T.tobytes()
    return base64.b85encode(zlib.compress(raw, 9)).decode()


def unpacked(text: str) -> bytes:
    """What ``packed`` took.

    Raises:
        ValueError: no such text.
    """
    try:
        decoder = zlib.decompressobj()
        raw = decoder.decompress(base64.b85decode(text), RNG_BYTES)
    except (ValueError, binascii.Error, zlib.error):
        raise ValueError("random state as text") from None
    if not raw or not decoder.eof:
        raise ValueError("random state as text")
    if len(raw) % 8 == 0:
        raw = np.frombuffer(raw, np.uint8).reshape(8, -1).T.tobytes()
    return raw


def restore(generator: torch.Generator, text: str) -> None:
    """Sets a generator.

    Raises:
        StateError: it is of another kind than the one that was saved.
    """
    try:
        generator.set_state(torch.frombuffer(bytearray(unpacked(text)), dtype=torch.uint8))
    except (RuntimeError, TypeError, ValueError) as e:
        raise StateError(f"the state dict's random state is not for this {generator.device} generator: {e}") from None


def _words(words: Any, *more: int, gauss: float | None) -> str:
    """A Mersenne Twister's words and what goes with them, each in 64 bits."""
    bits = 0 if gauss is None else struct.unpack("<Q", struct.pack("<d", gauss))[0]
    return _text(np.array([*words, *more, gauss is not None, bits], np.uint64).tobytes())


def _of_words(text: str, length: int) -> tuple[list[int], float | None]:
    words = np.frombuffer(unpacked(text), np.uint64).tolist()
    if len(words) != length + 2:
        raise ValueError(f"{len(words)} words")
    *words, has, bits = words
    return words, struct.unpack("<d", struct.pack("<Q", bits))[0] if has else None


def _python(state: Any) -> str:
    return _words(state[1], gauss=state[2])


def _set_python(text: str) -> None:
    words, gauss = _of_words(text, 625)
    random.setstate((3, tuple(words), gauss))


def _numpy(state: Any) -> str:
    return _words(state[1].tolist(), int(state[2]), int(state[3]), gauss=float(state[4]))


def _set_numpy(text: str) -> None:
    (*words, at, has), gauss = _of_words(text, 626)
    if at > 624 or has > 1:
        raise ValueError(f"position {at} in 624 words")
    np.random.set_state(("MT19937", np.array(words, np.uint32), at, has, gauss or 0.0))


_SET: dict[str, Callable[[str], None]] = {
    "torch": lambda text: restore(torch.default_generator, text),
    "python": _set_python,
    "numpy": _set_numpy,
}


class Draws:
    """Random state at one moment, of the process-wide generators and a sampler's own; texts only when they are asked
    for, because an epoch begins more often than it is saved."""

    def __init__(self, generator: torch.Generator | None, whole: bool) -> None:
        self.torch = torch.get_rng_state()
        self.own = None if generator is None else generator.get_state()
        # NumPy's are not loaded (5 ms) to be looked at.
        self.others = (
            (random.getstate(), np.random.get_state() if "numpy.random" in sys.modules else None) if whole else None
        )

    def texts(self, now: Draws | None = None) -> dict[str, str]:
        """By generator; only those that have moved, where it is said what they are now."""
        found: dict[str, str] = {}
        if now is None or not torch.equal(self.torch, now.torch):
            found["torch"] = packed(self.torch)
        if self.own is not None and (now is None or now.own is None or not torch.equal(self.own, now.own)):
            found["generator"] = packed(self.own)
        if self.others is not None:
            python, numpy = self.others
            if now is None or now.others is None or now.others[0] != python:
                found["python"] = _python(python)
            if numpy and (now is None or now.others is None or not _same_numpy(now.others[1], numpy)):
                found["numpy"] = _numpy(numpy)
        return found


def _same_numpy(a: Any, b: Any) -> bool:
    return bool(a[2:] == b[2:] and np.array_equal(a[1], b[1]))


def set_random(texts: dict[str, str], generator: torch.Generator | None) -> None:
    """Sets the process-wide generators that are named, and ``generator``.

    Raises:
        StateError: what is named cannot be set.
    """
    for name, text in texts.items():
        if name in _SET:
            try:
                _SET[name](text)
            except (ValueError, TypeError, OverflowError) as e:
                raise StateError(f"the state dict's random state for {name} cannot be set: {e}") from None
        elif name == "generator" and generator is not None:
            restore(generator, text)
        elif name == "generator":
            raise StateError("the state dict has random state for the sampler's generator, and the sampler has none")


class Shadow:
    """torch's global generator as a resumed run had it, for who has not put it back.

    As long as nobody has moved the global generator since, epochs are begun from the shadow, and come as they would
    have; once somebody has (who restored it, or draws from it), it is the real one that counts, as it was in that run.
    """

    def __init__(self, mine: str | None = None) -> None:
        self._mine = torch.frombuffer(bytearray(unpacked(mine)), dtype=torch.uint8) if mine is not None else None
        self._seen: torch.Tensor | None = None
        self.over_now = False

    def mark(self) -> None:
        """The global generator is looked at: whoever moves it from here on ends the shadow."""
        self._seen = torch.get_rng_state()

    def _holds(self) -> bool:
        return self._mine is not None and self._seen is not None and torch.equal(self._seen, torch.get_rng_state())

    @contextmanager
    def over(self) -> Iterator[None]:
        """Around what an epoch draws when it begins."""
        if self._mine is None or not self._holds():
            self._mine = None
            yield
            return
        real = torch.get_rng_state()
        if torch.equal(real, self._mine):  # who resumed put it back
            self._mine = None
            yield
            return
        torch.set_rng_state(self._mine)
        self.over_now = True
        try:
            yield
        finally:
            self.over_now = False
            self._mine = torch.get_rng_state()
            torch.set_rng_state(real)

    def now(self) -> torch.Tensor:
        """The global generator's state as that run would have it."""
        return self._mine if self._mine is not None and self._holds() else torch.get_rng_state()


@contextmanager
def still(*generators: torch.Generator | None) -> Iterator[None]:
    """Puts the process-wide generators and these back as they were, whatever is drawn inside."""
    python, cpu, numpy = random.getstate(), torch.get_rng_state(), np.random.get_state()
    own = [(g, g.get_state()) for g in generators if g is not None]
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(cpu)
        np.random.set_state(numpy)
        for g, state in own:
            g.set_state(state)
