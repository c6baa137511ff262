"""Pictures from files: the few decoders there are, and the choice between them.

Where a JPEG is decoded only to be shrunk a lot, libjpeg can decode it small: the inverse DCT of an 8x8 block gives 4x4,
2x2 or 1 pixel (IJG libjpeg, ``scale_num/scale_denom``; Pillow's ``Image.draft``). That is 3 to 4 times the pictures a
second and not quite the same pixels, so nothing here does it unless a size is given, and ``compare`` says how far
they are apart.
"""

from __future__ import annotations

import io
import math
import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core.errors import ImageError, StokerError, UsageError

DECODERS = ("auto", "pillow", "turbo")


def read(
    source: Any,
    size: int | tuple[int, int] | None = None,
    mode: str = "RGB",
    decoder: str = "auto",
    reducing_gap: float = 1.0,
) -> Any:
    """A picture from a file, shrunk while it is decoded where ``size`` allows that.

    Args:
        source: a path, bytes, or a file opened for reading.
        size: (width, height) of the result; or an int, the length of its shorter side; None: as it is, decoded whole.
        mode: Pillow's, of the result.
        reducing_gap: as Pillow's ``Image.thumbnail``: the picture is decoded at least so many times as large as asked,
            and the rest is resized. 1 is fastest; at 2 the pixels are closer (41 and 49 dB on photographs shrunk to a
            quarter, ``python -m benchmarks.staging psnr``).
        decoder: "pillow"; "turbo": libjpeg-turbo by simplejpeg, ``pip install stoker[turbo]``; "auto": Pillow.

    Returns:
        A ``PIL.Image.Image``. With a ``size`` the pixels differ slightly from those of decoding whole and then resizing
        (``compare`` measures it); without, they are Pillow's.

    Raises:
        UsageError: no such decoder, an extra that is missing, a size that is none.
        ImageError: for what is no picture, or a broken one; it is an OSError, as Pillow's are.
        OSError: the file cannot be read.

    Example:
        >>> from PIL import Image
        >>> file = io.BytesIO()
        >>> Image.new("RGB", (640, 480), "red").save(file, "jpeg")
        >>> read(file.getvalue(), (64, 48)).size, read(file.getvalue(), 60).size
        ((64, 48), (80, 60))
    """
    if decoder not in DECODERS:
        raise UsageError(f"decoder={decoder!r}: one of {', '.join(map(repr, DECODERS))}")
    sides = (size,) if isinstance(size, int) else size
    if sides is not None and (len(sides) > 2 or any(type(n) is not int or n < 1 for n in sides)):
        raise UsageError(f"size={size!r}: (width, height), or the length of the shorter side")
    if not reducing_gap >= 1.0:
        raise UsageError(f"reducing_gap={reducing_gap!r}: at least 1.0")
    Image = _pillow()
    if mode not in Image.MODES:
        raise UsageError(f"mode={mode!r}: one of {', '.join(Image.MODES)}")
    file = io.BytesIO(source) if isinstance(source, (bytes, bytearray, memoryview)) else source
    try:
        return _read(Image, file, source, sides, mode, decoder, reducing_gap)
    except (StokerError, MemoryError):
        raise
    except Exception as e:
        if isinstance(e, OSError) and e.errno is not None:
            raise  # no such file, no permission, a disk that fails: nothing is wrong with the picture
        name = f" {os.fspath(source)}" if isinstance(source, (str, os.PathLike)) else ""
        # Pillow's plugins raise SyntaxError, struct.error, IndexError and whatever else the bytes lead them to.
        raise ImageError(f"this is no picture, or a broken one:{name} ({type(e).__name__}: {e})") from e


def _read(
    Image: Any, file: Any, source: Any, sides: tuple[int, ...] | None, mode: str, decoder: str, reducing_gap: float
) -> Any:
    with Image.open(file) as picture:
        if sides is None:
            return picture.convert(mode) if picture.mode != mode else picture.copy()
        whole = picture.size
        wanted = sides if len(sides) == 2 else _shorter(whole, sides[0])
        if picture.format == "JPEG":
            if decoder == "turbo" and mode in ("RGB", "L") and picture.mode in ("RGB", "L"):
                picture = Image.fromarray(_turbo(source, picture, [reducing_gap * n for n in wanted], mode))
            else:
                picture.draft(mode, tuple(math.ceil(reducing_gap * n) for n in wanted))
        small = picture.convert(mode) if picture.mode != mode else picture
        return small.resize(wanted)


def _shorter(size: tuple[int, int], shorter: int) -> tuple[int, int]:
    """As torchvision's ``Resize(int)``: the other side keeps the proportion, rounded down."""
    w, h = size
    return (shorter, int(shorter * h / w)) if w <= h else (int(shorter * w / h), shorter)


def _turbo(source: Any, picture: Any, wanted: list[float], mode: str) -> np.ndarray[Any, Any]:
    try:
        import simplejpeg
    except ImportError as e:
        raise UsageError('decoder="turbo" wants an extra: pip install "stoker[turbo]"') from e
    if isinstance(source, (str, os.PathLike)):
        with open(source, "rb") as file:
            data = file.read()
    elif isinstance(source, (bytes, bytearray, memoryview)):
        data = bytes(source)
    else:
        source.seek(0)
        data = source.read()
    w, h = (min(n, math.ceil(k)) for n, k in zip(picture.size, wanted, strict=True))
    space = {"RGB": "RGB", "L": "GRAY"}[mode]
    out: np.ndarray[Any, Any] = simplejpeg.decode_jpeg(data, space, min_width=w, min_height=h, min_factor=1)
    return out if mode == "RGB" else out[:, :, 0]


class Difference(NamedTuple):
    """What decoding small costs and brings.

    Attributes:
        psnr_db: peak signal-to-noise ratio against decoding whole and then resizing, in dB, over all pixels.
        worst: the largest difference of one value, of 255.
        faster: how many times as many pictures a second.
        pictures: that were compared.
    """

    psnr_db: float
    worst: int
    faster: float
    pictures: int

    def __str__(self) -> str:
        return (
            f"decoded small: {self.faster:.1f} times as fast, PSNR {self.psnr_db:.1f} dB, at most {self.worst} of 255 "
            f"apart, over {self.pictures} pictures"
        )


def compare(
    sources: Sequence[Any],
    size: int | tuple[int, int] | Sequence[tuple[int, int]],
    mode: str = "RGB",
    decoder: str = "auto",
    reducing_gap: float = 1.0,
) -> Difference:
    """How far a picture that is decoded small is from one that is decoded whole and resized, and how much faster.

    Args:
        sources: paths or bytes of some pictures; a few dozen say enough.
        size: as for ``read``; or a list, for each picture its own.
        mode, decoder, reducing_gap: as for ``read``.

    Raises:
        UsageError: no pictures, or not as many sizes.
    """
    if not sources:
        raise UsageError("compare wants pictures")
    each: Sequence[Any] = size if isinstance(size, list) else [size] * len(sources)
    if len(each) != len(sources):
        raise UsageError(f"{len(each)} sizes for {len(sources)} pictures")
    squares, values, worst = 0.0, 0, 0
    times = [0.0, 0.0]
    Image = _pillow()
    for source, wanted in zip(sources, each, strict=True):
        began = time.perf_counter()
        small = read(source, wanted, mode, decoder, reducing_gap)
        middle = time.perf_counter()
        file = io.BytesIO(source) if isinstance(source, (bytes, bytearray, memoryview)) else source
        with Image.open(file) as picture:
            whole = picture.convert(mode).resize(small.size)
        times[0] += middle - began
        times[1] += time.perf_counter() - middle
        apart = np.asarray(small, np.int64) - np.asarray(whole, np.int64)
        squares += float((apart**2).sum())
        values += apart.size
        worst = max(worst, int(np.abs(apart).max()))
    psnr = 10 * math.log10(255**2 * values / squares) if squares else math.inf
    return Difference(psnr, worst, times[1] / times[0], len(sources))


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as e:
        raise UsageError("pictures want Pillow: pip install pillow") from e
    return Image
