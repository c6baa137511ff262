"""``cacheable_prefix``: no cause but a remedy: what is the same in every epoch could be kept instead of made anew.

Nothing of the dataset is called to find that out, so how much of a sample is the same is not known here, and no gain is
predicted: what is told is how much of the loop is spent on making samples again.
"""

from __future__ import annotations

from .loader_stats import Finding, LoaderStats
from .model import without

LEAST = 1.1  # of speed-up from the second epoch on, if all of a sample's making were saved
FEW = 5  # batches of an epoch; a shorter one is not gone through again for its samples


def check(case: LoaderStats) -> Finding | None:
    epochs, settings = int(case.loader["epochs"]), case.loader["settings"]
    tried = settings.get("applied")  # in this run: what came of it stands among what was applied
    if not case.starved or epochs < 2 or settings.get("iterable") or tried or case.batches < FEW * epochs:
        return None
    fetch = case.part("fetch")
    most = without(case, fetch)
    if not fetch or most is None or most < LEAST:
        return None
    return Finding(
        "cacheable_prefix",
        1 - 1 / most,
        {"epochs": epochs, "share_of_a_task": fetch, "later_epochs_at_most": round(most, 2)},
        f"{fetch:.0%} of making batches is making samples, anew in each of {epochs} epochs: stoker run --apply tries "
        f"to keep what is the same in all of them; later epochs would be up to {most:.1f}x as fast",
    )
