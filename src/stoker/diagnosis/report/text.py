"""The report for people: what was seen, the verdict, what to do, and, after ``--apply``, before and after."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any, TextIO

from ...core.terminal import colour_wanted, human_seconds, short, style, table, width
from ..doctor.loader_stats import LoaderStats
from .before_after_text import applied_lines
from .patch import MENDED

COLOURS = {"healthy": "green", "input-bound": "red", "transfer-bound": "red", "unknown": "yellow"}
SEEN = 0.005  # of the loop; what costs less costs something else
BEGINS = 0.1  # of the loop; what goes by before first batches is named from there on
SLOW_START = 0.15  # of the loop; from there on a loader is not called fine
LAST = 5  # of what was decided while running
TIMED = 3  # loaders whose epochs are named


def render(report: dict[str, Any], path: Path | None, stream: TextIO, columns: int = 0) -> str:
    """The whole report as text that fits the stream.

    Args:
        report: as in ``report.schema``.
        path: where it was written, if it was.
        stream: where the text will go; decides colour.
        columns: that a line may have; 0: as the stream has.
    """
    colour, columns = colour_wanted(stream), columns or width(stream)
    out = ["", style("stoker", "bold", colour) + _partial(report)]
    bypassing = [_wrapped(bypassed(b), columns) for b in report.get("bypassing", [])]
    if not report["loaders"]:
        none = "no DataLoader was iterated in this run: nothing to say about data loading"
        out += bypassing or [none]
        return "\n".join([*out, *([f"report: {path}"] if path else []), ""])
    out += [_loaders(report, columns), *bypassing]
    out += [_wrapped(words, columns) for words in clock(report)]
    out += _workers(report)
    out.append(f"verdict: {style(report['verdict'], COLOURS[report['verdict']], colour)}{_why(report)}")
    for f in report["findings"]:
        words = textwrap.wrap(f"{f['cause']}{_finding(f)}", columns - 2, subsequent_indent="  ")
        words[0] = words[0].replace(f["cause"], style(f["cause"], "bold", colour), 1)
        out += ["  " + line for line in words]
    late = (report.get("ranks") or {}).get("starving")
    if late is not None:
        out.append(_wrapped(_late(report["ranks"]["each"], late), columns))
    if report.get("ceilings"):
        out.append(_wrapped(_ceilings(report["ceilings"]), columns))
    if report["applied"]:
        out += applied_lines(report["applied"], columns, colour, stream)
    elif path is not None and _mends(report):
        out.append("try: stoker run --apply " + " ".join(report["command"]))
    if report.get("diff"):
        out += ["", "the same in your own code:", *_diff(report["diff"], colour)]
    if path is not None:
        out.append(f"report: {path}")
    return "\n".join(out) + "\n"


def _wrapped(words: str, columns: int) -> str:
    return "\n".join(textwrap.wrap(words, columns, subsequent_indent="  "))


def _finding(f: dict[str, Any]) -> str:
    """What a finding says behind its cause."""
    if f.get("applied"):
        brought = f.get("measured_speedup")
        what = "later epochs" if f["change"].get("staged") else "the loop"
        return f", applied: {f['fix']}" + (f"; {what} {brought:.2f}x" if brought else "")
    gain = f", predicted {f['predicted_speedup']:.2f}x" if f["predicted_speedup"] else ""
    costs = f"costs {f['share']:.0%} of the loop. " if f["share"] >= SEEN else ""
    return f": {costs}{f['fix']}{gain}"


def _mends(report: dict[str, Any]) -> bool:
    """Whether ``--apply`` would do something about a finding. It leaves streams as they are: their shards depend on the
    number of workers."""
    streams = {e["name"] for e in report["loaders"] if e["settings"].get("iterable")}
    return any(f["cause"] in MENDED and f["loader"] not in streams for f in report["findings"])


def bypassed(b: dict[str, Any]) -> str:
    """Of a loader that stoker's engine does not reach.

    Args:
        b: one of the report's ``bypassing``.
    """
    unseen = "" if b.get("seen", True) else ", and its batches were not counted"
    return f"{short(b['name'])}: stoker's engine does not reach this loader{unseen}: {b['reason']}"


def clock(report: dict[str, Any]) -> list[str]:
    """Wall clock of the script, and of the epochs of the loaders that took most of it, in words.

    Args:
        report: as in ``report.schema``.
    """
    out = [f"wall clock: the script took {human_seconds(report['wall_s'])}"]
    for e in sorted(report["loaders"], key=lambda e: -float(e["loop_s"]))[:TIMED]:
        found = e.get("epoch_s") or {}
        if not found:
            continue
        said = f"the first epoch of {short(e['name'])} {human_seconds(found['first'])}"
        if found["later"] is not None:
            said += f", later ones {human_seconds(found['later'])} (median of {found['count'] - 1})"
        out.append(said)
    return ["; ".join(out)]


def _diff(diff: str, colour: bool) -> list[str]:
    """Lines that can be copied as they are: neither wrapped nor indented."""
    colours = {"+": "green", "-": "red", "@": "dim"}
    return [
        style(line, colours[line[0]], colour) if line[0] in colours else line
        for line in diff.removesuffix("\n").split("\n")
    ]


def _late(each: list[dict[str, Any]], late: int) -> str:
    """Of a rank that makes the others wait."""
    waits = {r["rank"]: r["wait_s"] / max(1, r["batches"]) for r in each}
    others = max(wait for rank, wait in waits.items() if rank != late)
    return (
        f"rank {late} starves the others: it waits {human_seconds(waits[late])} for a batch, they at most "
        f"{human_seconds(others)}, and then for it"
    )


def _ceilings(found: dict[str, Any]) -> str:
    """What loop, steps and loader make, and which of the two bounds the loop."""
    if "loader" not in found:
        return f"ceilings of {short(found['name'])}: not measured, the run or its epochs were too short"
    loop, steps, loader = found["loop"], found["steps"], found["loader"]
    bound = "the loader bounds it" if loader < steps else "the steps bound it"
    return (
        f"ceilings of {short(found['name'])}, samples/s: the loop {loop:,.0f}, its steps alone {steps:,.0f}, its "
        f"loader alone {loader:,.0f}; {bound}"
    )


def _partial(report: dict[str, Any]) -> str:
    code = report["exit_code"]
    said = (
        f" (the command ended by signal {-code})"
        if code < 0
        else f" (the command's exit code was {code})"
        if code
        else ""
    )
    return said + (" (partial: a process ended without a last word)" if report["partial"] else "")


def _share(entry: dict[str, Any]) -> float:
    total = entry["wait_s"] + entry["step_s"]
    return float(entry["wait_s"] / total) if total else 0.0


def _loaders(report: dict[str, Any], columns: int) -> str:
    headers = ["loader", "workers", "batches", "waited", "of loop", "step", "samples/s"]
    rows = []
    for e in report["loaders"]:
        workers = str(e["settings"].get("num_workers", "?")) + (" auto" if e["settings"].get("auto") else "")
        rows.append(
            [
                short(e["name"]),
                workers,
                f"{e['batches']:,}",
                human_seconds(e["wait_s"]),
                f"{_share(e):.0%}",
                human_seconds(e["step_s"] / max(1, e["batches"])),
                f"{e['samples_per_s']:,.0f}",
            ]
        )
    return table(headers, rows, columns)


def _workers(report: dict[str, Any]) -> list[str]:
    """What the workers of each loader weighed, and what was decided about them."""
    out = []
    for e in report["loaders"]:
        pss = e.get("memory", {}).get("worker_pss", [])
        if pss:
            together = "" if len(pss) == 1 else f"{len(pss)} x up to {max(pss) >> 20:,} MB, together "
            out.append(f"memory of {short(e['name'])}'s workers (PSS): {together}{sum(pss) >> 20:,} MB")
        out += [f"{short(e['name'])}: {words}" for words in e.get("decisions", [])[-LAST:]]
        out += [f"{short(e['name'])}: {words}" for words in _faults(e.get("faults") or {})]
    return out


def _faults(faults: dict[str, Any]) -> list[str]:
    """What failed and was gone on without."""
    out = []
    if faults.get("samples"):
        first = faults["first"][0]
        file = f" ({first['file']})" if first["file"] else ""
        where = f"; all are in {faults['quarantine']}" if faults.get("quarantine") else ""
        out.append(
            f"{faults['samples']:,} samples could not be loaded; the first, sample {first['index']!r}{file}: "
            f"{first['error']}{where}"
        )
    if faults.get("timeouts"):
        out.append(f"{faults['timeouts']:,} times a sample took longer than sample_timeout; its worker was replaced")
    if faults.get("deaths"):
        out.append(f"{faults['deaths']:,} workers died and were replaced; the last: {faults['died'][-1]}")
    return out


def waited(report: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The loader in whose loop most of the time went by, and how much of that was waiting."""
    main = max(report["loaders"], key=lambda e: float(e["wait_s"] + e["step_s"]))
    case = LoaderStats(main, int(report["machine"].get("cores", 1)))
    said = f"the loop waits for data {case.share:.0%} of its time"
    begins = case.startup / case.total if case.total else 0.0
    if begins >= BEGINS:
        first = "epochs' first batches take" if int(main["epochs"]) > 1 else "the first batch takes"
        after = "them" if int(main["epochs"]) > 1 else "it"
        said = f"{first} {begins:.0%} of the loop's time, and after {after} it waits {case.share:.0%}"
    return main, said


def _why(report: dict[str, Any]) -> str:
    verdict = report["verdict"]
    main, waits = waited(report)
    if verdict == "healthy":
        case = LoaderStats(main, int(report["machine"].get("cores", 1)))
        slow = case.total and case.startup / case.total >= SLOW_START
        return f": {waits}" if slow else f": your loader is fine, {waits}"
    if verdict == "unknown":
        return f": {main['batches']} batches are too few to tell; let it run for more steps"
    if verdict == "transfer-bound":
        return f": {waits}, and its data crosses to the device too late"
    return f": {waits}"
