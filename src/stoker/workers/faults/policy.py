"""What is to be done about a sample that fails, as frozen settings that travel to workers, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ...core.errors import UsageError
from ...core.nested import pin

ACTIONS = ("raise", "skip", "replace")
WORDS = 300  # characters of an error
QUARANTINE = "stoker-quarantine.jsonl"


class Failure(NamedTuple):
    """What went wrong with a sample.

    Attributes:
        index: what the sampler said: a number, a word, else its ``repr``.
        file: where the dataset has a list of them; else "".
        error: in words, one line, the type first.
        kind: "error", "death" (its worker died of it) or "timeout".
    """

    index: Any
    file: str
    error: str
    kind: str = "error"


class _Nothing:
    """Stands for a batch of which no sample is left."""

    def __reduce__(self) -> str:
        return "NOTHING"


NOTHING = _Nothing()


class Partial:
    """A batch that is not what was asked for, and why. The parent takes it apart when the batch is delivered."""

    __slots__ = ("data", "failures")

    def __init__(self, data: Any, failures: Sequence[Failure]) -> None:
        self.data, self.failures = data, tuple(failures)

    def __reduce__(self) -> Any:
        return Partial, (self.data, self.failures)

    def pin_memory(self, device: str | None = None) -> Partial:
        """torch's hook for types of one's own."""
        data = self.data if self.data is NOTHING else pin(self.data, device)
        return Partial(data, self.failures)


@dataclass(frozen=True)
class OnError:
    """The policy for samples that fail.

    Attributes:
        action: "raise", "skip", "replace" or "call".
        refill: with "skip": other samples of the batch, once more, take the places.
        call: with "call": gets index and error; what it returns stands in place of the sample, None leaves it out.
        among: with "replace": indices that the sampler might have drawn; None: only those of the batch are known.
    """

    action: str = "raise"
    refill: bool = False
    call: Callable[[Any, Exception], Any] | None = None
    among: Sequence[Any] | None = None


def on_error_of(loader: Any) -> OnError:
    """A loader's policy; torch's own loaders have "raise"."""
    asked = getattr(loader, "on_error", "raise")
    if callable(asked):
        return OnError("call", call=asked)
    return OnError(asked, refill=loader.refill if asked == "skip" else False, among=_among(loader, asked))


def _among(loader: Any, asked: str) -> Sequence[Any] | None:
    """The indices that torch's own samplers draw from. What any other would never draw, a validation sample for
    instance, is not to slip in."""
    sampler = loader.sampler
    if asked != "replace" or (loader.batch_sampler is not None and loader.batch_size is None):
        return None  # a batch_sampler of the user's: the loader's own sampler is not what draws
    if isinstance(sampler, SubsetRandomSampler):
        return sampler.indices
    if isinstance(sampler, WeightedRandomSampler):
        indices: list[int] = sampler.weights.nonzero().flatten().tolist()
        return indices
    if isinstance(sampler, (SequentialSampler, RandomSampler, DistributedSampler)):
        return range(len(loader.dataset))
    return None


def words_of(error: BaseException) -> str:
    """An error in one line."""
    try:
        said = str(error)
    except Exception:  # code of the user's
        said = ""
    words = " ".join(f"{type(error).__name__}: {said}".split()).rstrip(":")
    return words if len(words) <= WORDS else words[:WORDS] + "..."


def plain(index: Any) -> Any:
    """An index that any process can read."""
    if type(index) in (int, str):
        return index
    try:
        return int(index.__index__())  # NumPy's, or a tensor of one
    except Exception:
        return repr(index)[:WORDS]


def check(on_error: Any, refill: Any, max_errors: Any) -> None:
    """Raises for words that are none.

    Raises:
        UsageError: what is wrong, and what is right.
    """
    if not callable(on_error) and on_error not in ACTIONS:
        raise UsageError(f"on_error={on_error!r}: one of {', '.join(map(repr, ACTIONS))}, or a function")
    if refill and on_error != "skip":
        raise UsageError('refill=True says how on_error="skip" keeps a batch\'s size; it goes with nothing else')
    whole = isinstance(max_errors, int) and not isinstance(max_errors, bool) and max_errors >= 0
    if max_errors is not None and not whole and not (isinstance(max_errors, float) and 0 <= max_errors < 1):
        raise UsageError(
            f"max_errors={max_errors!r}: how many samples may fail, as a whole number, or as a share of the dataset "
            "from 0.0 to less than 1.0"
        )
