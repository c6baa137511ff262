"""Where tasks come from: the sampler's order, one ``Task`` at a time."""

from __future__ import annotations

from typing import Any, NamedTuple


class Task(NamedTuple):
    """The indices of one batch, and their place in the epoch.

    Attributes:
        number: position in the sampler's order, from 0.
        indices: what the index sampler yielded: a list of keys, one key, or Nones for an iterable dataset.
    """

    number: int
    indices: Any
