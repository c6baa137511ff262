"""Copies batches to the device ahead of time, on a separate stream, while the consumer computes on earlier ones.

1. ``DeviceIter._take`` takes a batch from the loader's iterator, if it is ready, and records the loader's position.
2. ``Lane.send`` starts the copy, on the lane's stream.
3. ``Lane.arrive`` makes the consumer's stream wait for the copy's event; the CPU never waits (CUDA C++ Programming
   Guide, "Events"). The batch's memory is not reused before that stream is done with it (``record_stream``).

Without an accelerator nothing is copied, so a script runs anywhere.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ..core.errors import UsageError
from ..core.nested import move, tensors
from ..core.types import Batch
from .accelerator import current_device, device_count

logger = logging.getLogger(__name__)
OutOfMemory: type[Exception] = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)
DEPTH = 2  # batches ahead: one being copied, one ready


class Lane:
    """Copies batches on the consumer's stream: for MPS, which has one queue, and for the CPU, where nothing is
    copied."""

    def __init__(self, device: torch.device, transform: Callable[[Batch], Batch] | None) -> None:
        self._device, self._transform = device, transform

    def send(self, batch: Batch) -> tuple[Batch, torch.Event | None]:
        """Starts a copy. Returns the batch on the device, and the event to wait for, if any. Raises ``OutOfMemory`` if
        the device is full."""
        moved = batch if self._device.type == "cpu" else move(batch, self._device)
        return (moved if self._transform is None else self._transform(moved)), None

    def arrive(self, batch: Batch, event: torch.Event | None) -> None:
        """Lets the consumer's stream use the batch from here on."""

    def spare(self) -> None:
        """Waits until the device has finished all work, and frees unused memory."""


class SideLane(Lane):
    """Copies batches on a stream separate from the consumer's: for CUDA and XPU."""

    def __init__(self, device: torch.device, transform: Callable[[Batch], Batch] | None) -> None:
        super().__init__(device, transform)
        self._module = getattr(torch, device.type)
        self._stream = self._module.Stream(device)

    def send(self, batch: Batch) -> tuple[Batch, torch.Event | None]:
        with self._module.stream(self._stream):
            moved = move(batch, self._device)
            if self._transform is not None:
                moved = self._transform(moved)
            return moved, self._stream.record_event()

    def arrive(self, batch: Batch, event: torch.Event | None) -> None:
        stream = self._module.current_stream(self._device)
        stream.wait_event(event)
        for t in tensors(batch):
            if t.device == self._stream.device:
                t.record_stream(stream)

    def spare(self) -> None:
        self._module.synchronize(self._device)
        self._module.empty_cache()


class DeviceIter:
    """Yields an iterator's batches on a device, copied ``depth`` batches ahead; with 0, each is copied on request.
    Other attributes are the iterator's."""

    def __init__(self, it: Iterator[Batch], lane: Lane, depth: int) -> None:
        self._it = it
        self._lane = lane
        self._depth = depth
        self._sent: deque[tuple[Batch, torch.Event | None]] = deque()
        self._unsent: list[Batch] = []  # at most one: taken from the iterator, but not on the device yet
        self._end: Exception | None = None
        # The loader must report the consumer's position, not that of batches taken ahead: one mark for each of these.
        place = getattr(it, "_cursor", None) if depth else None
        self._place = place if hasattr(place, "shown") else None
        self._marks: deque[object] = deque()
        # stoker's iterators tell whether their next batch has arrived. A batch that nobody requested is not waited for.
        self._arrived: Callable[[], bool] = getattr(it, "arrived", lambda: True)

    def __iter__(self) -> DeviceIter:
        return self

    def __next__(self) -> Batch:
        self._fill(1, wait=True)
        if not self._sent:
            assert self._end is not None
            self._show(self._marks.popleft() if self._marks else None)
            if not isinstance(self._end, StopIteration):
                end, self._end = self._end, None  # after an error in one batch, torch's iterator goes on
                raise end
            raise StopIteration
        batch, event = self._sent.popleft()
        mark = self._marks.popleft() if self._marks else None
        self._lane.arrive(batch, event)
        self._fill(self._depth)
        self._show(mark)
        return batch

    def _reset(self, loader: object, first_iter: bool = False) -> None:
        """Begins another epoch of an iterator with persistent workers."""
        self._sent.clear()
        self._unsent.clear()
        self._marks.clear()
        self._end = None
        self._it._reset(loader, first_iter)  # type: ignore[attr-defined]

    def _show(self, mark: object) -> None:
        if self._place is not None:
            self._place.shown = mark

    def _fill(self, depth: int, wait: bool = False) -> None:
        while len(self._sent) < depth and self._end is None:
            if not self._unsent:
                if not (wait or self._arrived()):
                    return
                try:
                    self._take()
                except Exception as e:  # raised after the batches before it
                    self._end = e
                    return
            try:
                self._sent.append(self._lane.send(self._unsent[0]))
            except OutOfMemory:
                if self._sent:  # there may be room once the consumer has taken these
                    self._shrink()
                    return
                self._lane.spare()
                self._shrink()
                self._sent.append(self._lane.send(self._unsent[0]))
            self._unsent.clear()

    def _take(self) -> None:
        place = self._place
        if place is None:
            self._unsent.append(next(self._it))
            return
        shown, place.shown = place.shown, None
        try:
            self._unsent.append(next(self._it))
            self._marks.append(place.copy_position())
        except StopIteration:
            raise
        except Exception:
            self._marks.append(place.copy_position())
            raise
        finally:
            place.shown = shown

    def _shrink(self) -> None:
        if self._depth > 1:
            self._depth -= 1
            logger.warning("the device is out of memory: copying %s batch(es) ahead from now on", self._depth)

    def __getattr__(self, name: str) -> Any:
        if name == "_it":
            raise AttributeError(name)
        return getattr(self._it, name)


class OnDevice:
    """A loader with its batches on a device; made by ``to_device``. Other attributes are the loader's."""

    def __init__(
        self, loader: Any, device: torch.device, depth: int, transform: Callable[[Batch], Batch] | None
    ) -> None:
        self.loader, self.device, self._depth, self._transform = loader, device, depth, transform

    def __iter__(self) -> DeviceIter:
        return ahead(iter(self.loader), self.device, self._depth, self._transform)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


def to_device(
    loader: Iterable[Batch],
    device: str | int | torch.device | None = None,
    depth: int = DEPTH,
    transform_on_device: Callable[[Batch], Batch] | None = None,
) -> OnDevice:
    """Moves a loader's batches to a device, ahead of the consumer and in parallel with its computation.

    Args:
        loader: any iterable of batches, including torch's ``DataLoader``. Copies overlap only from page-locked memory
            (``pin_memory=True`` or ``"auto"``).
        device: torch's name or index; None for the accelerator, or the CPU if there is none.
        depth: batches ahead, each of which takes device memory. Reduced, with a log message, if the device runs out.
        transform_on_device: called with each batch on the copy stream, for instance to normalise or flip.

    Returns:
        An object to iterate over instead; ``len`` and attributes are the loader's.

    Raises:
        UsageError: if there is no such device, or ``depth`` is below 1.

    Example:
        >>> for batch in to_device([torch.ones(2), torch.zeros(2)], "cpu", transform_on_device=torch.neg):
        ...     print(batch)
        tensor([-1., -1.])
        tensor([-0., -0.])
    """
    on = checked(device)
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise UsageError(f"depth must be a positive number of batches, not {depth!r}")
    return OnDevice(loader, on, depth, transform_on_device)


def checked(device: str | int | torch.device | None) -> torch.device:
    """Returns the device with this name. Raises UsageError if there is none; the message lists what there is."""
    current = current_device()
    if device is None:
        return current or torch.device("cpu")
    try:
        asked = torch.device(device)
    except RuntimeError as e:
        raise UsageError(f"device={device!r}: {str(e).splitlines()[0]}") from e
    if asked.type == "cpu":
        return asked
    count = device_count()
    if current is None or asked.type != current.type or (asked.index or 0) >= count:
        found = f"{count} {current.type} devices" if current is not None else "only the CPU"
        raise UsageError(f"no such device {device!r}; found {found}")
    return asked if asked.index is not None else torch.device(asked.type, current.index)


def ahead(
    it: Iterator[Batch], device: torch.device, depth: int = DEPTH, transform: Callable[[Batch], Batch] | None = None
) -> DeviceIter:
    """Yields an iterator's batches on a device; see ``to_device``."""
    lane = Lane if device.type in ("cpu", "mps") else SideLane
    return DeviceIter(it, lane(device, transform), 0 if device.type == "cpu" else depth)
