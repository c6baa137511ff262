"""``stoker.tune``: finds the best settings for a loader."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..core.errors import UsageError
from ..core.random_state import preserved
from ..loader import engine
from ..loader.variant import as_loader, variant
from .knobs import ALL_KNOBS, BUDGET_S, KNOBS
from .measurements import Measurements
from .result import TuneResult
from .search import TunerSearch


def _check(knobs: Sequence[str], budget_s: float) -> None:
    for knob in knobs:
        if knob not in ALL_KNOBS:
            raise UsageError(f"unknown knob {knob!r}: choose from {', '.join(ALL_KNOBS)}")
    if not budget_s > 0:
        raise UsageError(f"budget_s must be a positive number of seconds, not {budget_s!r}")
    if not engine.SUPPORTED:
        raise UsageError("tuning needs stoker's own workers, which are supported on Linux only")


def tune(
    thing: object,
    *,
    knobs: Sequence[str] = KNOBS,
    budget_s: float = BUDGET_S,
    batch_size: int | None = None,
    name: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> TuneResult:
    """Finds the best settings for a loader by measuring on this machine.

    Runs an empty loop over workers of its own, with the loader's dataset and collate function. The loader, its sampler
    and all random state remain untouched.

    Args:
        thing: a DataLoader (torch's own or stoker's), a Dataset, or a callable without arguments that returns one.
        knobs: which settings may move: num_workers, prefetch_factor, pin_memory. batch_size may be among them. Another
            batch size changes the training: the steps of an epoch, and the learning rate that suits.
        budget_s: seconds it may take, about.
        batch_size: samples in a batch, instead of the loader's own (32 for a dataset).
        name: what to call it in the result.
        progress: called with a line of text for each measurement.

    Returns:
        The setting, and all that led to it; a notebook shows it as a drawing and as text.

    Raises:
        UsageError: ``thing`` is no loader or is empty, a sample cannot be loaded, a batch takes longer than the
            budget, or batch_size may move and the loader makes its own batches.

    Example:
        >>> result = stoker.tune(loader)  # doctest: +SKIP
        >>> print(result.lines["torch"])  # doctest: +SKIP
        DataLoader(dataset, batch_size=32, shuffle=True, num_workers=2, prefetch_factor=4)
    """
    _check(knobs, budget_s)
    name = name or getattr(thing, "__name__", None) or type(thing).__name__
    loader = as_loader(thing, batch_size, name)
    if "batch_size" in knobs:
        variant(loader, batch_size=2 * (loader.batch_size or 1))  # raises where the loader makes its own batches
    measured = Measurements(loader, budget_s, progress or (lambda _: None))
    search = TunerSearch(measured, name, knobs)
    try:
        with preserved():
            return search.result(search.run())
    finally:
        measured.close()
