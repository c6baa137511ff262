"""Names a sample in messages: by its index, and by its file if that is known."""

from __future__ import annotations

from ...core.types import Index

MAX_INDEX = 200  # characters kept of an index's repr


def called(index: Index, file: str) -> str:
    """Returns the name of a sample for messages.

    Example:
        >>> called(17, "a.jpg"), called("k", "")
        ('sample 17 (a.jpg)', "sample 'k'")
    """
    text = repr(index)
    text = text if len(text) <= MAX_INDEX else text[:MAX_INDEX] + "..."
    return f"sample {text}" + (f" ({file})" if file else "")
