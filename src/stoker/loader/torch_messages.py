"""Repeats torch's messages, read from torch's own code at run time so that they always match."""

from __future__ import annotations

from collections.abc import Callable


def torch_message(function: Callable[..., object], start: str) -> str:
    """The string in a torch function that begins with ``start``; "" if this version of torch has none."""
    texts = (c for c in function.__code__.co_consts if isinstance(c, str))
    return next((text for text in texts if text.startswith(start)), "")
