"""The formulas by which people set ``num_workers``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Guess:
    """What one formula says, and what it would have cost.

    Attributes:
        name: the formula.
        workers: what it says; None where it cannot say.
        words: how it came to that.
        rate: samples per second with it; None where that is not known.
        share: of the recommended setting's rate.
        how: "measured", "model", or why it was not tried.
    """

    name: str
    workers: int | None
    words: str
    rate: float | None = None
    share: float | None = None
    how: str = ""


def guesses(
    cores: int, gpus: int, batch_size: int, sample_bytes: int = 0, throughput: float | None = None
) -> list[Guess]:
    """Every formula's guess.

    Args:
        cores: granted.
        gpus: in the machine; 0 counts as one, as people do.
        batch_size: samples in a batch.
        sample_bytes: of one sample (the "entry").
        throughput: bytes per second that one GPU takes in; None where there is no GPU.

    Example:
        >>> [g.workers for g in guesses(cores=8, gpus=2, batch_size=64)]
        [8, 8, 32, 8, None]
    """
    n = max(1, gpus)
    of = f"{n} GPU{'s' if n > 1 else ''}" + ("" if gpus else " (none here: taken as one)")
    entry = max(1, sample_bytes) * batch_size
    balance = "entry x batch x workers = GPUs x GPU throughput"
    if throughput is None:
        balanced = Guess(balance, None, "needs a GPU's throughput, and there is no GPU")
    else:
        words = f"{n} x {throughput / 1e9:.3g} GB/s / ({sample_bytes:,} bytes x {batch_size})"
        balanced = Guess(balance, max(1, round(n * throughput / entry)), words)
    return [
        Guess("as many as cores", cores, f"{cores} cores granted"),
        Guess("four per GPU", 4 * n, of),
        Guess("batch / GPUs", max(1, batch_size // n), f"{batch_size} / {of}"),
        Guess("batch / CPUs", max(1, batch_size // cores), f"{batch_size} / {cores}"),
        balanced,
    ]
