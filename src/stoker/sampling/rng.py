"""Random state as it was: of the process-wide generators and of a sampler's own, as a few kilobytes of text."""

from __future__ import annotations

import base64
import binascii
import functools
import random
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ..core.errors import StateError

BASE64 = ":"  # begins such a text; no digit of base 85
RNG_BYTES = 1 << 16  # of one generator; a text that unpacks to more is none of ours


def packed(state: torch.Tensor) -> str:
    """A generator's state as text: 3.5 KB for torch's CPU generator, of whose 5,056 bytes half are zero."""
    return _text(bytes(state.numpy().tobytes()))


@functools.lru_cache(maxsize=64)  # scripts save after each step, and most generators have not moved since the last one
def _text(raw: bytes) -> str:
    """Bytes of the same significance together, because half of torch's words are always zero."""
    if len(raw) % 8 == 0:
        raw = np.frombuffer(raw, np.uint8).reshape(-1, 8).T.tobytes()
    return BASE64 + base64.b64encode(zlib.compress(raw, 1)).decode()


def unpacked(text: str) -> bytes:
    """What ``packed`` took.

    Raises:
        ValueError: no such text.
    """
    try:
        decoder = zlib.decompressobj()
        # State dicts of version 1 have base 85, whose encoder is 40 times slower.
        packed = base64.b64decode(text[1:], validate=True) if text[:1] == BASE64 else base64.b85decode(text)
        raw = decoder.decompress(packed, RNG_BYTES)
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


NAMES = frozenset(_SET) | {"generator"}


class Draws:
    """Random state at one moment, of the process-wide generators and a sampler's own; texts only when they are asked
    for, because an epoch begins more often than it is saved."""

    def __init__(self, generator: torch.Generator | None, whole: bool) -> None:
        self.torch = torch.get_rng_state() if whole or generator is None else None
        self.own = None if generator is None else generator.get_state()
        # NumPy's are not loaded (5 ms) to be looked at.
        self.others = (
            (random.getstate(), np.random.get_state() if "numpy.random" in sys.modules else None) if whole else None
        )

    def texts(self, now: Draws | None = None) -> dict[str, str]:
        """By generator; only those that have moved, where it is said what they are now."""
        found: dict[str, str] = {}
        if self.torch is not None and (now is None or now.torch is None or not torch.equal(self.torch, now.torch)):
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


class SavedGlobalRng:
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
