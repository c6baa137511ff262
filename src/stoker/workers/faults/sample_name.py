"""How a sample is named in messages: by its index, and its file where that is known."""

from __future__ import annotations

from typing import Any

LONGEST = 200  # characters of an index that is an object


def called(index: Any, file: str) -> str:
    """A sample in a sentence.

    Example:
        >>> called(17, "a.jpg"), called("k", "")
        ('sample 17 (a.jpg)', "sample 'k'")
    """
    words = repr(index)
    words = words if len(words) <= LONGEST else words[:LONGEST] + "..."
    return f"sample {words}" + (f" ({file})" if file else "")
