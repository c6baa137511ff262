"""The policy for samples that fail, as frozen settings that are sent to workers, and the failures sent back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch.utils import data as torch_data

from ...core.errors import UsageError, one_line
from ...core.nested import pin
from ...core.types import Batch, Index, LoaderLike, Sample

ACTIONS = ("raise", "skip", "replace")
MAX_ERROR = 300  # characters kept of an error
MAX_INDEX = 200  # characters kept of an index's repr
QUARANTINE = "stoker-quarantine.jsonl"


class Failure(NamedTuple):
    """What went wrong with a sample."""

    index: Index  # yielded by the sampler: an int or a str, else its ``repr``
    file: str  # its file, if the dataset lists files; else ""
    error: str  # one line, starting with the type
    kind: str = "error"  # "error", "death" (its worker died of it) or "timeout"


class _Nothing:
    """Stands for a batch without samples."""

    def __reduce__(self) -> str:
        return "NOTHING"


NOTHING = _Nothing()


class Partial:
    """A batch in which samples failed, with the failures. The parent separates the two on delivery."""

    __slots__ = ("data", "failures")

    def __init__(self, data: Batch, failures: Sequence[Failure]) -> None:
        self.data = data
        self.failures = tuple(failures)

    def pin_memory(self, device: str | None = None) -> Partial:
        """torch's pinning hook for user-defined types."""
        data = self.data if self.data is NOTHING else pin(self.data, device)
        return Partial(data, self.failures)


@dataclass(frozen=True)
class OnError:
    """The policy for samples that fail."""

    action: str = "raise"  # "raise", "skip", "replace" or "call"
    refill: bool = False  # with "skip": repeat other samples of the batch instead
    # with "call": gets index and error, and returns the replacement, or None to skip the sample
    call: Callable[[Index, Exception], Sample] | None = None
    # with "replace": indices that the sampler might have drawn; None if only those of the batch are known
    among: Sequence[Index] | None = None


def on_error_of(loader: LoaderLike) -> OnError:
    """Returns a loader's policy; torch's own loaders have "raise"."""
    asked = getattr(loader, "on_error", "raise")
    if callable(asked):
        return OnError("call", call=asked)
    return OnError(asked, refill=asked == "skip" and getattr(loader, "refill", False), among=_among(loader, asked))


def _among(loader: LoaderLike, asked: str) -> Sequence[Index] | None:
    """Returns the indices that torch's own samplers draw from; None for other samplers. An index that a sampler would
    never draw, a validation sample for instance, must not be used."""
    sampler = loader.sampler
    if asked != "replace" or (loader.batch_sampler is not None and loader.batch_size is None):
        return None  # a user's batch_sampler draws, not the loader's own sampler
    if isinstance(sampler, torch_data.SubsetRandomSampler):
        return sampler.indices
    if isinstance(sampler, torch_data.WeightedRandomSampler):
        indices: list[int] = sampler.weights.nonzero().flatten().tolist()
        return indices
    if isinstance(sampler, (torch_data.SequentialSampler, torch_data.RandomSampler, torch_data.DistributedSampler)):
        return range(len(loader.dataset))
    return None


def summary(error: BaseException) -> str:
    """Formats an error in one line."""
    try:
        text = one_line(error).rstrip(":")
    except Exception:  # from the user's __str__
        text = type(error).__name__
    return text if len(text) <= MAX_ERROR else text[:MAX_ERROR] + "..."


def plain(index: Index) -> int | str:
    """Converts an index to a plain int or str, which any process can read."""
    if isinstance(index, (int, str)) and type(index) in (int, str):
        return index
    try:
        return int(index.__index__())  # a NumPy integer, or a tensor with one element
    except Exception:
        return repr(index)[:MAX_ERROR]


def called(index: Index, file: str) -> str:
    """Returns the name of a sample for messages: ``sample 17 (a.jpg)``."""
    text = repr(index)
    text = text if len(text) <= MAX_INDEX else text[:MAX_INDEX] + "..."
    return f"sample {text}" + (f" ({file})" if file else "")


def check(on_error: object, refill: object, max_errors: object) -> None:
    """Checks a loader's arguments. Raises UsageError, which says what is wrong and what is allowed."""
    if not callable(on_error) and on_error not in ACTIONS:
        raise UsageError(f"on_error must be one of {', '.join(map(repr, ACTIONS))}, or a function, not {on_error!r}")
    if refill and on_error != "skip":
        raise UsageError(
            'refill=True refills batches from which on_error="skip" removed samples, so it needs on_error="skip"'
        )
    whole = isinstance(max_errors, int) and not isinstance(max_errors, bool) and max_errors >= 0
    if max_errors is not None and not whole and not (isinstance(max_errors, float) and 0 <= max_errors < 1):
        raise UsageError(
            "max_errors must be an integer (samples that may fail) or a float from 0.0 to below 1.0 (share of the "
            f"dataset), not {max_errors!r}"
        )
