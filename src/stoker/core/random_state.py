"""Random state of torch's, NumPy's and Python's process-wide generators, and of generators that objects hold.

Captures, compares, restores states, and writes them as text for state dicts. Every captured value consists of bytes,
numbers and tuples, so values can be compared, hashed and pickled.
"""

from __future__ import annotations

import base64
import functools
import pickle
import random
import struct
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias, cast

import numpy as np
import torch

from . import numpy_state
from .errors import StateError
from .numpy_state import freeze, thaw
from .types import JsonObject

Generator: TypeAlias = (
    random.Random | torch.Generator | np.random.RandomState | np.random.Generator | np.random.BitGenerator
)
Value: TypeAlias = object  # one generator's state

_GLOBAL: dict[str, Generator] = {
    "torch": torch.default_generator,
    "python": random._inst,
    "numpy": np.random.mtrand._rand,
}
PROCESS_WIDE = tuple(_GLOBAL)
NAMES = frozenset(PROCESS_WIDE) | {"generator"}  # as used in a state dict
BASE64 = ":"  # first character of base64 text; version 1 wrote base85, whose alphabet lacks it
MAX_TEXT_BYTES = 1 << 16  # of one generator's state; a text that unpacks to more was not written here
MT_WORDS = 624  # of a Mersenne Twister


class RandomState:
    """The state of several random generators at one moment."""

    def __init__(
        self, others: Iterable[tuple[str, Generator]] = (), process_wide: Collection[str] = PROCESS_WIDE
    ) -> None:
        self._others: dict[str, Generator] = {}
        # the state of each, by name
        self.values: dict[str, Value] = {k: get_state(_GLOBAL[k]) for k in PROCESS_WIDE if k in process_wide}
        for name, generator in others:
            while name in self.values:  # two local classes of one name
                name += "'"
            self._others[name] = generator
            self.values[name] = get_state(generator)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RandomState) and self.values == other.values

    __hash__ = None  # type: ignore[assignment]

    def moved(self, now: RandomState | None = None) -> list[str]:
        """Names of generators whose state differs ``now``. None: compares with the current state."""
        if now is None:
            now = RandomState(self._others.items(), self.values)
        return [name for name, value in self.values.items() if now.values.get(name) != value]

    def in_order(self) -> list[Value]:
        """All states, for a comparison that ignores the generators' names."""
        return list(self.values.values())

    def restore(self, names: Collection[str] | None = None) -> None:
        """Restores the state of all generators, or of those with the ``names`` that ``moved`` gave."""
        for name, value in self.values.items():
            if names is None or name in names:
                set_state(self._others[name] if name in self._others else _GLOBAL[name], value)

    def to_bytes(self) -> bytes:
        """Serializes the process-wide generators' states for another process of this run; 10 KB, 40 us."""
        return pickle.dumps(self.values, protocol=5)

    @classmethod
    def from_bytes(cls, raw: bytes) -> RandomState:
        """Inverse of ``to_bytes``, within the same run."""
        state = cls((), ())
        state.values = pickle.loads(raw)
        return state

    def to_texts(self, names: Iterable[str]) -> JsonObject:
        """The states of these generators as texts, by name, for a state dict: at most 3.5 KB each."""
        return {name: _WRITE.get(name, to_text)(self.values[name]) for name in names}

    @classmethod
    def from_texts(cls, texts: Mapping[str, str], generator: torch.Generator | None) -> RandomState:
        """Parses states that ``to_texts`` wrote, by name. Raises StateError if a text is not valid for a generator of
        that name."""
        if "generator" in texts and generator is None:
            raise StateError(
                "the state dict has random state for the sampler's generator, but the sampler has no generator"
            )
        state = cls((), ())
        for name, text in texts.items():
            if name not in NAMES:
                continue
            try:
                state.values[name] = _READ.get(name, from_text)(text)
            except (ValueError, OverflowError) as e:
                raise StateError(f"the state dict's random state for {name} cannot be set: {e}") from None
        if generator is not None and "generator" in texts:
            state._others["generator"] = generator
        return state

    def restore_saved(self) -> None:
        """``restore`` for states from a state dict. Raises StateError if a generator rejects its state."""
        try:
            self.restore()
        except (RuntimeError, TypeError, ValueError, OverflowError) as e:
            raise StateError(f"the state dict's random state cannot be set: {e}") from None


@contextmanager
def preserved(*generators: Generator | None) -> Iterator[None]:
    """Restores the process-wide generators, CUDA's and ``generators`` on exit, whatever was drawn inside."""
    before = RandomState([(str(k), g) for k, g in enumerate(generators) if g is not None])
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        before.restore()
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


# -- one generator


def get_state(generator: Generator) -> Value:
    """A generator's state, which can be compared, hashed and kept."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if generator is _GLOBAL["numpy"]:
        return numpy_state.save()
    if isinstance(generator, np.random.RandomState):
        return freeze(generator.get_state(legacy=False))
    return freeze(bit_generator(generator).state)


def set_state(generator: Generator, state: Value) -> None:
    """Sets a generator to what ``get_state`` returned for it, or for one of the same kind."""
    if isinstance(generator, random.Random):
        generator.setstate(cast("tuple[object, ...]", state))
    elif isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(cast(bytes, state)), dtype=torch.uint8))
    elif generator is _GLOBAL["numpy"]:
        numpy_state.restore(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(cast("dict[str, object]", thaw(state)))
    else:
        bit_generator(generator).state = cast("dict[str, object]", thaw(state))


def bit_generator(generator: np.random.Generator | np.random.BitGenerator) -> np.random.BitGenerator:
    """Returns the object that holds the state of a NumPy generator."""
    return generator.bit_generator if isinstance(generator, np.random.Generator) else generator


def set_from_text(generator: torch.Generator, text: str) -> None:
    """Sets a generator to a state from a state dict. Raises StateError if the state is for another kind of
    generator."""
    try:
        set_state(generator, from_text(text))
    except (RuntimeError, TypeError, ValueError) as e:
        raise StateError(f"the state dict's random state does not fit this {generator.device} generator: {e}") from None


# -- as text


@functools.lru_cache(maxsize=64)  # scripts save after each step, and most generators have not moved since
def to_text(raw: bytes) -> str:
    """Encodes bytes as text. Groups bytes of the same significance, because half of torch's are always zero."""
    if len(raw) % 8 == 0:
        raw = np.frombuffer(raw, np.uint8).reshape(-1, 8).T.tobytes()
    return BASE64 + base64.b64encode(zlib.compress(raw, 1)).decode()


def from_text(text: str) -> bytes:
    """Inverse of ``to_text``. Raises ValueError if ``to_text`` did not write the text."""
    try:
        decoder = zlib.decompressobj()
        # Version 1 wrote base85, whose encoder is 40 times slower.
        packed = base64.b64decode(text[1:], validate=True) if text[:1] == BASE64 else base64.b85decode(text)
        raw = decoder.decompress(packed, MAX_TEXT_BYTES)
    except (ValueError, zlib.error):  # binascii.Error is a ValueError
        raise ValueError("random state as text") from None
    if not raw or not decoder.eof:
        raise ValueError("random state as text")
    if len(raw) % 8 == 0:
        raw = np.frombuffer(raw, np.uint8).reshape(8, -1).T.tobytes()
    return raw


def _twister_text(words: Iterable[int], gauss: float | None) -> str:
    """Encodes the words of a Mersenne Twister, then whether a normal number is cached, then that number; 64 bits
    each."""
    bits = 0 if gauss is None else struct.unpack("<Q", struct.pack("<d", gauss))[0]
    return to_text(np.array([*words, gauss is not None, bits], np.uint64).tobytes())


def _read_twister(text: str, length: int) -> tuple[list[int], float | None]:
    words = np.frombuffer(from_text(text), np.uint64).tolist()
    if len(words) != length + 2:
        raise ValueError(f"{len(words)} words")
    *words, has_gauss, bits = words
    return words, struct.unpack("<d", struct.pack("<Q", bits))[0] if has_gauss else None


@functools.lru_cache(maxsize=8)
def _python_text(value: Value) -> str:
    _, words, gauss = cast("tuple[int, tuple[int, ...], float | None]", value)
    return _twister_text(words, gauss)


def _read_python(text: str) -> Value:
    words, gauss = _read_twister(text, MT_WORDS + 1)
    return 3, tuple(words), gauss


@functools.lru_cache(maxsize=8)
def _numpy_text(value: Value) -> str:
    state = numpy_state.as_dict(value)
    if state["bit_generator"] != "MT19937":
        raise StateError(f"NumPy's process-wide generator is a {state['bit_generator']}, whose state cannot be saved")
    words = [*state["state"]["key"].tolist(), int(state["state"]["pos"]), int(state["has_gauss"])]
    return _twister_text(words, float(state["gauss"]))


def _read_numpy(text: str) -> Value:
    (*words, position, has_gauss), gauss = _read_twister(text, MT_WORDS + 2)
    if position > MT_WORDS or has_gauss > 1:
        raise ValueError(f"position {position} in {MT_WORDS} words")
    key = {"key": np.array(words, np.uint32), "pos": position}
    return freeze({"bit_generator": "MT19937", "state": key, "has_gauss": has_gauss, "gauss": gauss or 0.0})


_WRITE: dict[str, Callable[..., str]] = {"python": _python_text, "numpy": _numpy_text}
_READ: dict[str, Callable[[str], Value]] = {"python": _read_python, "numpy": _read_numpy}


def owns_global_generators() -> bool:
    """Whether no other thread can draw from the process-wide generators."""
    info = torch.utils.data.get_worker_info()
    return getattr(info, "worker_method", "process") != "thread"


def is_one_draw(before: RandomState, after: RandomState) -> bool:
    """Whether torch's global generator gave exactly one 64-bit number between two states."""
    generator = torch.Generator()
    set_state(generator, before.values["torch"])
    torch.empty((), dtype=torch.int64).random_(generator=generator)
    return bool(generator.get_state().numpy().tobytes() == after.values["torch"])
