"""What ``iter(loader)`` returns without workers: torch's own iterator, whose place in the epoch can be saved."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch.utils.data._utils import pin_memory as torch_pin
from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter

from .cursor import Cursor
from .randomness import still
from .seeding import seed_task, unchanged
from .stage import is_plain, put_back, skip, state_of
from .stateful import is_stateful, noted, put, read

if TYPE_CHECKING:
    from .state import Part, State


class InlineIter(_SingleProcessDataLoaderIter):
    """torch's own iterator without workers, whose place in the epoch can be saved.

    Args:
        loader: torch's ``DataLoader`` or a subclass.
        cursor: where the epoch is, and where it goes on.
    """

    def __init__(self, loader: Any, cursor: Cursor) -> None:
        saved = cursor.saved
        state: Any = None
        parts: tuple[Part, ...] = ()
        cursor.prepare()
        if saved is not None:
            cursor.kind = "iterable" if loader._dataset_kind == _DatasetKind.Iterable else "map"
            parts = cursor.parts(1)
            state = parts[0].state if parts else None
            if state is not None:
                put(loader.dataset, state["dataset"], "dataset")
        with cursor.quiet():
            super().__init__(loader)
        cursor.lives_on, cursor.workers = True, 0
        cursor.adopt(self)
        self._cursor, self._task_seeds = cursor, cursor.task_seeds
        fetcher = self._dataset_fetcher
        inner = getattr(fetcher, "dataset_iter", None)
        if state is not None and inner is not None:
            put_back(fetcher, state)
        if is_stateful(self._dataset) or is_stateful(inner):
            cursor.live = functools.partial(_live, self._dataset, fetcher)
        if saved is not None:
            self._IterableDataset_len_called = saved.len_called  # type: ignore[assignment]
            self._num_yielded = saved.next
        cursor.len_called = self._IterableDataset_len_called
        self._sampler_iter = cursor.begin(self._sampler_iter)
        cursor.epoch = 0 if saved is None else saved.epoch
        if saved is not None and inner is not None and parts:
            self._skip(saved, parts[0])

    def _skip(self, saved: State, part: Part) -> None:
        """Takes what an iterable dataset gave since its state was taken, or since the beginning."""
        with still():
            if not self._task_seeds:
                self._cursor.set_random(saved)
            for number in range(part.at, part.count):
                if self._task_seeds:
                    seed_task(saved.base_seed, saved.epoch, number)
                if not skip(self._dataset_fetcher, self._cursor.batch_size, plain=is_plain(self._collate_fn)):
                    break

    def _next_data(self) -> Any:
        cursor = self._cursor
        try:
            index = next(self._sampler_iter)
            if self._task_seeds:
                with unchanged():
                    seed_task(cursor.base_seed, cursor.epoch, cursor.next)
                    data = self._dataset_fetcher.fetch(index)
            else:
                data = self._dataset_fetcher.fetch(index)
        except StopIteration:
            cursor.finished = True
            raise
        except Exception:
            cursor.next += 1
            raise
        cursor.next += 1
        if self._pin_memory:
            data = torch_pin.pin_memory(data, self._pin_memory_device)
        return data

    def state_dict(self) -> dict[str, Any]:
        """The loader's, while this is its iterator."""
        return self._cursor.save().to_dict()


def _live(dataset: Any, fetcher: Any) -> Any:
    """A dataset's state as it is now; a copy, made and read here."""
    return read(noted(lambda: state_of(dataset, fetcher)))
