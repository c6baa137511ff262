"""How a sample is named in messages: by its index, and its file where that is known."""

from __future__ import annotations

from ...core.types import Index

MAX_INDEX = 200  # characters of an index that is an object


def called(index: Index, file: str) -> str:
    """The name of a sample in messages.

    Example:
        >>> called(17, "a.jpg"), called("k", "")
        ('sample 17 (a.jpg)', "sample 'k'")
    """
    text = repr(index)
    text = text if len(text) <= MAX_INDEX else text[:MAX_INDEX] + "..."
    return f"sample {text}" + (f" ({file})" if file else "")
