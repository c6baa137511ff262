"""Before and after ``--apply``, in wall clock: of the script, of first and later epochs, of each loader's whole loop.

"Before" is an observed run of the same command where one is remembered. Without one it is estimated from the first
epoch of the applied run, where a cache serves nothing yet: each later epoch would have taken as long.
"""

from __future__ import annotations

from typing import Any

Pair = dict[str, "float | None"]


def of(
    wall_s: float, loaders: list[dict[str, Any]], settings: dict[str, Any], before: dict[str, Any] | None, script: str
) -> dict[str, Any]:
    """The comparison, for the report's ``applied``.

    Args:
        wall_s: seconds of the applied run, from the start of the command to its end.
        loaders: the report's.
        settings: what was applied, by loader.
        before: the observed run that is remembered, if one is.
        script: digest of the script as it is now.

    Returns:
        ``estimated``, ``script`` (``before`` and ``after``, seconds), ``loaders`` (``name``, and as pairs ``first``,
        ``later`` and ``samples_per_s``; ``each``: seconds of every epoch), ``notes``, ``cost`` (what stoker spent, in
        seconds, which is inside the figures). A figure that is not known is None.
    """
    if before is not None:
        rows = [_measured(e, before) for e in loaders]
        script_before: float | None = before["wall_s"] if before["complete"] else None
    else:
        rows = [_estimated(e, settings.get(e["name"]) or {}) for e in loaders]
        saved = [row["saved_s"] for row in rows if row["saved_s"] is not None]
        script_before = wall_s + sum(saved) if saved else None
    return {
        "estimated": before is None,
        "script": {"before": script_before, "after": wall_s},
        "loaders": [{key: value for key, value in row.items() if key != "saved_s"} for row in rows],
        "notes": _notes(before, script),
        "cost": cost(settings),
    }


def cost(settings: dict[str, Any]) -> dict[str, float]:
    """Seconds that stoker spent: before first batches (``trials_s``), and in workers to store samples (``fill_s``)."""
    caches = [change.get("cache") or {} for change in settings.values()]
    return {
        "trials_s": sum(float(change.get("measured_s") or 0.0) for change in settings.values()),
        "fill_s": sum(float(cache.get("fill_s") or 0.0) for cache in caches),
    }


def _measured(e: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    old = next((x for x in before["loaders"] if x["name"] == e["name"]), None)
    if old is None and len(before["loaders"]) == 1:  # its line has moved
        old = before["loaders"][0]
    then, now = (old or {}).get("epoch_s") or {}, e.get("epoch_s") or {}
    return _row(e, {**then, "samples_per_s": (old or {}).get("samples_per_s")}, now, None)


def _estimated(e: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """From the first epoch, where a cache was filled in it; else there is nothing to estimate from."""
    now, cache = e.get("epoch_s") or {}, change.get("cache") or {}
    if not (cache.get("filled") or change.get("to", {}).get("staged")) or now.get("later") is None:
        return _row(e, {}, now, None)
    workers = max(1, int(e["settings"].get("num_workers") or 1))
    spent = float(change.get("measured_s") or 0.0) + float(cache.get("fill_s") or 0.0) / workers
    first = max(now["later"], now["first"] - spent) if spent < now["first"] else now["first"]
    saved = sum(first - seconds for seconds in now["each"][1:]) + first - now["first"]
    rate = e["samples"] / (e["loop_s"] + saved) if e["loop_s"] + saved > 0 else None
    then = {"first": first, "later": first, "samples_per_s": rate, "each": [first] * len(now["each"])}
    return _row(e, then, now, saved)


def _row(e: dict[str, Any], then: dict[str, Any], now: dict[str, Any], saved: float | None) -> dict[str, Any]:
    return {
        "name": e["name"],
        **{key: {"before": then.get(key), "after": now.get(key)} for key in ("first", "later")},
        "samples_per_s": {"before": then.get("samples_per_s"), "after": e["samples_per_s"]},
        "each": {"before": then.get("each", []), "after": now.get("each", [])},
        "saved_s": saved,
    }


def _notes(before: dict[str, Any] | None, script: str) -> list[str]:
    if before is None:
        return []
    out = []
    if before["script"] != script:
        out.append("the script has been edited since the observed run")
    if not before["complete"]:
        out.append("the observed run was ended early, so it has no total to compare with")
    return out


def gain(pair: Pair, rate: bool = False) -> float | None:
    """How many times as fast it is now; None where one of both is not known.

    Example:
        >>> gain({"before": 4.0, "after": 2.0}), gain({"before": 100.0, "after": 300.0}, rate=True)
        (2.0, 3.0)
    """
    then, now = pair["before"], pair["after"]
    if not then or not now:
        return None
    return now / then if rate else then / now
