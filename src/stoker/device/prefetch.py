"""Batches on the device before they are asked for: copied on a stream of their own while the last ones are computed on.

The consumer's stream waits for the copy by an event, never the processor (CUDA C++ Programming Guide, "Events"). Memory
of a batch is not used again before the consumer's stream is done with it (``Tensor.record_stream``). Where there is no
device nothing happens, so that a script runs anywhere.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from ..core.errors import UsageError
from ..core.nested import move, tensors

logger = logging.getLogger(__name__)
Full: type[Exception] = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)
DEPTH = 2  # batches ahead: one that is copied, one that is ready


class Lane(Protocol):
    """How batches get to a device. Tests have one that is late and runs out of memory."""

    def send(self, batch: Any) -> tuple[Any, Any]:
        """Asks for a copy. Returns the batch on the device and what to wait for.

        Raises:
            torch.OutOfMemoryError: the device is full.
        """
        ...

    def arrive(self, batch: Any, event: Any) -> None:
        """From here on the consumer's stream may use the batch."""
        ...

    def spare(self) -> None:
        """Waits until the device has done all, and lets go of memory that nobody uses."""
        ...


class Direct:
    """No stream of its own: the CPU, which has nothing to copy, and MPS, which has one queue."""

    def __init__(self, device: torch.device, transform: Callable[[Any], Any] | None) -> None:
        self._device, self._transform = device, transform

    def send(self, batch: Any) -> tuple[Any, Any]:
        moved = batch if self._device.type == "cpu" else move(batch, self._device)
        return (moved if self._transform is None else self._transform(moved)), None

    def arrive(self, batch: Any, event: Any) -> None:
        """It is there."""

    def spare(self) -> None:
        """There is no more."""


class Side:
    """A stream beside the consumer's: CUDA, XPU."""

    def __init__(self, device: torch.device, transform: Callable[[Any], Any] | None) -> None:
        self._device, self._transform = device, transform
        self._kind = getattr(torch, device.type)
        self._stream = self._kind.Stream(device)

    def send(self, batch: Any) -> tuple[Any, Any]:
        with self._kind.stream(self._stream):
            moved = move(batch, self._device)
            if self._transform is not None:
                moved = self._transform(moved)
            return moved, self._stream.record_event()

    def arrive(self, batch: Any, event: Any) -> None:
        stream = self._kind.current_stream(self._device)
        stream.wait_event(event)
        for t in tensors(batch):
            if t.device == self._stream.device:
                t.record_stream(stream)

    def spare(self) -> None:
        self._kind.synchronize(self._device)
        self._kind.empty_cache()


class DeviceIter:
    """Batches of an iterator, on a device. Whatever else is asked of it the iterator answers.

    Args:
        it: gives batches.
        lane: moves them.
        depth: batches ahead; 0: each is moved when it is asked for.
    """

    def __init__(self, it: Iterator[Any], lane: Lane, depth: int) -> None:
        self._it, self._lane, self._depth = it, lane, depth
        self._ahead: deque[tuple[Any, Any]] = deque()
        self._here: list[Any] = []  # a batch for which there was no room on the device
        self._end: Exception | None = None
        # The loader's place is where the consumer is, not what was taken from it: one mark for each batch ahead.
        place = getattr(it, "_cursor", None) if depth else None
        self._place = place if hasattr(place, "shown") else None
        self._marks: deque[Any] = deque()
        # stoker's own iterators say whether their next batch is there: nobody waits for a batch that is not asked for.
        self._arrived: Callable[[], bool] = getattr(it, "arrived", lambda: True)

    def __iter__(self) -> DeviceIter:
        return self

    def __next__(self) -> Any:
        self._fill(1, wait=True)
        if not self._ahead:
            assert self._end is not None
            self._show(self._marks.popleft() if self._marks else None)
            if not isinstance(self._end, StopIteration):
                end, self._end = self._end, None  # an error in one batch: torch's iterator goes on behind it
                raise end
            raise StopIteration
        batch, event = self._ahead.popleft()
        mark = self._marks.popleft() if self._marks else None
        self._lane.arrive(batch, event)
        self._fill(self._depth)
        self._show(mark)
        return batch

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Another epoch, of an iterator whose workers stay."""
        self._ahead.clear()
        self._here.clear()
        self._marks.clear()
        self._end = None
        self._it._reset(loader, first_iter)  # type: ignore[attr-defined]

    def _show(self, mark: Any) -> None:
        if self._place is not None:
            self._place.shown = mark

    def _fill(self, depth: int, wait: bool = False) -> None:
        while len(self._ahead) < depth and self._end is None:
            if not self._here:
                if not (wait or self._arrived()):
                    return
                try:
                    self._take()
                except Exception as e:  # in its turn: the batches before it are the consumer's
                    self._end = e
                    return
            try:
                self._ahead.append(self._lane.send(self._here[0]))
            except Full:
                if self._ahead:  # with those that are ahead given out there may be room
                    self._shrink()
                    return
                self._lane.spare()
                self._shrink()
                self._ahead.append(self._lane.send(self._here[0]))
            self._here.clear()

    def _take(self) -> None:
        place = self._place
        if place is None:
            self._here.append(next(self._it))
            return
        shown, place.shown = place.shown, None
        try:
            self._here.append(next(self._it))
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
            logger.warning("the device is out of memory: %s batch(es) ahead from now on", self._depth)

    def __getattr__(self, name: str) -> Any:
        if name == "_it":
            raise AttributeError(name)
        return getattr(self._it, name)


class OnDevice:
    """A loader whose batches are on a device; made by ``to_device``. All else is answered by the loader."""

    def __init__(self, loader: Any, device: torch.device, depth: int, transform: Callable[[Any], Any] | None) -> None:
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
    loader: Any,
    device: str | int | torch.device | None = None,
    depth: int = DEPTH,
    transform_on_device: Callable[[Any], Any] | None = None,
) -> OnDevice:
    """A loader's batches on a device, copied ahead of the consumer and beside what it computes.

    Args:
        loader: anything that gives batches; torch's ``DataLoader`` too. Copies overlap only from page-locked memory
            (``pin_memory=True`` or ``"auto"``).
        device: torch's name or number of it; None: the accelerator, the CPU where there is none.
        depth: batches ahead; each takes memory there. Fewer, and a line in the log, where the device runs out of it.
        transform_on_device: called with each batch, on the stream of the copies; normalising, flips.

    Returns:
        What is iterated over instead; ``len`` and attributes are the loader's.

    Raises:
        UsageError: no such device here, a depth below 1.

    Example:
        >>> for batch in to_device([torch.ones(2), torch.zeros(2)], "cpu", transform_on_device=torch.neg):
        ...     print(batch)
        tensor([-1., -1.])
        tensor([-0., -0.])
    """
    return OnDevice(loader, checked(device), _depth(depth), transform_on_device)


def checked(device: str | int | torch.device | None) -> torch.device:
    """The device, if it is here.

    Raises:
        UsageError: it is not, and the message says what is.
    """
    found: Any = getattr(torch, "accelerator", None)
    here = found.current_accelerator() if found is not None and found.is_available() else None
    if device is None:
        return torch.device(here.type, found.current_device_index()) if here is not None else torch.device("cpu")
    try:
        asked = torch.device(device)
    except RuntimeError as e:
        raise UsageError(f"device={device!r}: {str(e).splitlines()[0]}") from e
    if asked.type == "cpu":
        return asked
    count = found.device_count() if here is not None else 0
    if here is None or asked.type != here.type or (asked.index or 0) >= count:
        there = f"{count} of {here.type}" if here is not None else "none but the CPU"
        raise UsageError(f"device={device!r} is not here; there is {there}")
    return asked if asked.index is not None else torch.device(asked.type, found.current_device_index())


def _depth(depth: int) -> int:
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise UsageError(f"depth={depth!r}: a number of batches, at least 1")
    return depth


def ahead(
    it: Iterator[Any], device: torch.device, depth: int = DEPTH, transform: Callable[[Any], Any] | None = None
) -> DeviceIter:
    """An iterator's batches on a device; see ``to_device``."""
    lane: Lane = Direct(device, transform) if device.type in ("cpu", "mps") else Side(device, transform)
    return DeviceIter(it, lane, 0 if device.type == "cpu" else depth)
