"""Pictures that are decoded large only to be shrunk: decoding them small is offered, with what that would change.

Never done unasked: the pixels are not quite the same (``stoker.image``).
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from .. import image

LEAST = 2.0  # the smallest step that libjpeg has
TRY_S = 0.5  # of looking for pictures


class Shrunk(NamedTuple):
    """A JPEG that was decoded and then resized.

    Attributes:
        source: its path, or its bytes.
        decoded, wanted: (width, height) in pixels.
    """

    source: Any
    decoded: tuple[int, int]
    wanted: tuple[int, int]


@contextlib.contextmanager
def watched() -> Iterator[list[Shrunk]]:
    """Notes each JPEG that Pillow decodes at least ``LEAST`` times as large as it is wanted next. One thread."""
    from PIL import Image
    from PIL.JpegImagePlugin import JpegImageFile

    found: list[Shrunk] = []
    last: list[Any] = [None, None]  # the picture decoded last: its source and its size
    load, resize = JpegImageFile.load, Image.Image.resize

    def loading(self: Any) -> Any:
        if self.tile:  # else it was loaded before
            file = self.fp
            name = self.filename or getattr(file, "name", None)
            last[:] = file.getvalue() if isinstance(file, io.BytesIO) else name, self.size
        return load(self)

    def resizing(self: Any, size: Any, *args: Any, **kwargs: Any) -> Any:
        wide, high = size
        if self.size == last[1] and isinstance(last[0], (str, bytes, os.PathLike)):
            if self.width >= LEAST * wide and self.height >= LEAST * high:
                found.append(Shrunk(last[0], self.size, (wide, high)))
            last[:] = None, None
        return resize(self, size, *args, **kwargs)

    JpegImageFile.load, Image.Image.resize = loading, resizing  # type: ignore[method-assign]
    try:
        yield found
    finally:
        JpegImageFile.load, Image.Image.resize = load, resize  # type: ignore[method-assign]


def offer(prepare: Callable[[Any], Any], indices: Sequence[int]) -> str:
    """What decoding small would bring, in words, measured on a few samples; "" where there is nothing to offer.

    Args:
        prepare: makes a sample of an index.
        indices: samples to try.
    """
    if "PIL.JpegImagePlugin" not in sys.modules:
        return ""
    began = time.perf_counter()
    with watched() as found:
        for i in indices:
            with contextlib.suppress(Exception):  # whoever asks for this sample hears why
                prepare(i)
            if time.perf_counter() - began > TRY_S:
                break
    if not found:
        return ""
    try:
        difference = image.compare([x.source for x in found], [x.wanted for x in found])
    except Exception:  # a file that is gone by now
        return ""
    if difference.faster < 1 / 0.9:
        return ""
    (wide, high), (w, h) = found[0].decoded, found[0].wanted
    return (
        f"Pictures of {wide}x{high} are decoded whole and shrunk to {w}x{h}; stoker.image.read(path, ({w}, {h})) "
        f"instead: {difference}"
    )
