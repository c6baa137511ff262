"""``cacheable_prefix``: no cause but a remedy: what is the same in every epoch could be kept instead of made anew."""

from __future__ import annotations

from . import Case, Finding
from .model import without

LEAST = 1.1  # of speed-up from the second epoch on


def check(case: Case) -> Finding | None:
    found = case.loader.get("cacheable") or {}
    made = float(found.get("prepare_s", 0.0)) + float(found.get("augment_s", 0.0))
    if not case.starved or not made or not found.get("saved_s"):
        return None
    saved = max(0.0, found["prepare_s"] - found["read_s"]) / made * found["share"]
    now, then = without(case, 0.0), without(case, saved * case.part("fetch"))
    if not now or not then or then < LEAST * now:
        return None
    later = then / now
    epochs = int(case.loader["epochs"])
    whole = epochs / (1 + (epochs - 1) / later)
    evidence = {
        "samples": found["samples"],
        "sample_bytes": round(found["sample_bytes"]),
        "megabytes": round(found["nbytes"] / 1e6, 1),
        "free_megabytes": round(found["free"] / 1e6),
        "fits": found["share"],
        "fill_s": round(found["fill_s"], 2),
        "saved_s_per_epoch": round(found["saved_s"], 2),
        "later_epochs": round(later, 2),
        "border": found["border"],
    }
    if found.get("offer"):
        evidence["decode_less"] = found["offer"]
    return Finding(
        "cacheable_prefix",
        case.share * saved,
        evidence,
        f"{saved:.0%} of making a sample is the same in every epoch: stoker.Staged(dataset) keeps it, "
        f"{evidence['megabytes']:,} MB of {evidence['free_megabytes']:,} free; epochs after the first {later:.1f}x",
        whole,
        {"staged": True} if epochs > 1 and found["share"] == 1 else {},
    )
