"""``DataLoader(debug=True)`` and ``stoker run --debug``: everything in this process, so that a breakpoint stops and a
traceback is plain; and an error says which sample it was, and what it was in."""

from __future__ import annotations

import copy

from ..core.types import LoaderLike
from ..sampling.cursor import Cursor
from .inline_iterator import InlineIter


class DebugIter(InlineIter):
    """torch's own iterator without workers, for a loader with any number of them.

    Order and shapes are the loader's own. Random augmentation is another draw, for it comes from this process' random
    state; ``worker_init_fn`` is not called; an iterable dataset is read as a whole.
    """

    def __init__(self, loader: LoaderLike, cursor: Cursor | None = None) -> None:
        alone = copy.copy(loader)
        vars(alone).update(num_workers=0, prefetch_factor=None, persistent_workers=False, timeout=0, _iterator=None)
        super().__init__(alone, Cursor(loader._index_sampler, loader.generator) if cursor is None else cursor)
