"""``DataLoader(debug=True)`` and ``stoker run --debug``: everything in this process, so that a breakpoint stops and a
traceback is plain; and an error says which sample it was, and what it was in."""

from __future__ import annotations

import copy
from typing import Any

from .cursor import Cursor
from .faults.names import called, listed
from .inline import InlineIter
from .stacks import known_getters, known_transforms, transform_of


class DebugIter(InlineIter):
    """torch's own iterator without workers, for a loader with any number of them.

    Order and shapes are the loader's own. Random augmentation is another draw, for it comes from this process' random
    state; ``worker_init_fn`` is not called; an iterable dataset is read as a whole.
    """

    def __init__(self, loader: Any, cursor: Cursor | None = None) -> None:
        alone = copy.copy(loader)
        vars(alone).update(num_workers=0, prefetch_factor=None, persistent_workers=False, timeout=0, _iterator=None)
        super().__init__(alone, Cursor(loader._index_sampler, loader.generator) if cursor is None else cursor)
        fetch, dataset = self._dataset_fetcher.fetch, loader.dataset

        def explained(index: Any) -> Any:
            try:
                return fetch(index)
            except StopIteration:
                raise
            except Exception as e:
                note = explain(e, dataset)
                if note and hasattr(e, "add_note"):  # Python 3.11
                    e.add_note(note)
                raise

        self._dataset_fetcher.fetch = explained


def explain(error: BaseException, dataset: Any) -> str:
    """Which sample an error came from, its file where the dataset has a list of them, and the transform; empty where
    its traceback does not go through the dataset.

    Example:
        >>> class Odd:
        ...     def __getitem__(self, i):
        ...         return 1 // (i % 2)
        >>> try:
        ...     Odd()[4]
        ... except ZeroDivisionError as e:
        ...     explain(e, Odd())
        'stoker: while loading sample 4'
    """
    frames = []
    at = error.__traceback__
    while at is not None:
        frames.append(at.tb_frame)
        at = at.tb_next
    getters = known_getters(dataset)
    index: Any = None
    words = ""
    for f in reversed(frames):  # of datasets inside each other the innermost, which knows its files
        if f.f_code in getters and f.f_code.co_argcount > 1:
            index = f.f_locals.get(f.f_code.co_varnames[1])
            words = f"stoker: while loading {called(index, listed(f.f_locals.get('self'), index))}"
            break
    transform = transform_of([f.f_code for f in frames[::-1]], known_transforms(dataset))
    if transform:
        words = f"{words or 'stoker: while loading a sample'}, in the transform {transform}"
    return words
