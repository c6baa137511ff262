"""The report for people: what was seen, the verdict, what to do, and, after ``--apply``, before and after."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any, TextIO

from ..doctor import Case
from .diff import MENDED
from .terminal import colour_wanted, human_seconds, style, table, width

COLOURS = {"healthy": "green", "input-bound": "red", "transfer-bound": "red", "unknown": "yellow"}
SEEN = 0.005  # of the loop; what costs less costs something else
BEGINS = 0.1  # of the loop; what goes by before first batches is named from there on
LAST = 5  # of what was decided while running


def render(report: dict[str, Any], path: Path | None, stream: TextIO) -> str:
    """The whole report as text that fits the stream.

    Args:
        report: as in ``report.schema``.
        path: where it was written, if it was.
        stream: where the text will go; decides width and colour.
    """
    colour, columns = colour_wanted(stream), width(stream)
    out = ["", style("stoker", "bold", colour) + _partial(report)]
    if not report["loaders"]:
        out.append("no DataLoader was iterated in this run: nothing to say about data loading")
        return "\n".join([*out, *([f"report: {path}"] if path else []), ""])
    out.append(_loaders(report, columns))
    out += _workers(report)
    out.append(f"verdict: {style(report['verdict'], COLOURS[report['verdict']], colour)}{_why(report)}")
    for f in report["findings"]:
        gain = f", predicted {f['predicted_speedup']:.2f}x" if f["predicted_speedup"] else ""
        costs = f"costs {f['share']:.0%} of the loop. " if f["share"] >= SEEN else ""
        words = textwrap.wrap(f"{f['cause']}: {costs}{f['fix']}{gain}", columns - 2, subsequent_indent="  ")
        words[0] = words[0].replace(f["cause"], style(f["cause"], "bold", colour), 1)
        out += ["  " + line for line in words]
    for words in report.get("reading", []):
        out += textwrap.wrap(f"by hand: {words}", columns, subsequent_indent="  ")
    late = (report.get("ranks") or {}).get("starving")
    if late is not None:
        out += textwrap.wrap(_late(report["ranks"]["each"], late), columns, subsequent_indent="  ")
    if report.get("ceilings"):
        out += textwrap.wrap(_ceilings(report["ceilings"]), columns, subsequent_indent="  ")
    if report["applied"]:
        out += _applied(report, columns, colour)
    elif report["verdict"] == "input-bound" and path is not None:
        out.append("try: stoker run --apply " + " ".join(report["command"]))
    if report.get("diff"):
        left = "what is left to do" if report["applied"] else "the same in the script itself"
        out += ["", f"{left}:", *_diff(report["diff"], colour)]
    if path is not None:
        out.append(f"report: {path}")
    return "\n".join(out) + "\n"


def _diff(diff: str, colour: bool) -> list[str]:
    """Lines that can be copied as they are: neither wrapped nor indented."""
    colours = {"+": "green", "-": "red", "@": "dim"}
    return [style(line, colours[line[0]], colour) if line[0] in colours else line for line in diff.splitlines()]


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
        return f"ceilings of {_short(found['name'])}: not measured, the run or its epochs were too short"
    loop, steps, loader = found["loop"], found["steps"], found["loader"]
    bound = "the loader bounds it" if loader < steps else "the steps bound it"
    return (
        f"ceilings of {_short(found['name'])}, samples/s: the loop {loop:,.0f}, its steps alone {steps:,.0f}, its "
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


def _short(name: str) -> str:
    """``file:line`` without the folders, which would push the numbers out of a small terminal."""
    return name.replace("\\", "/").rsplit("/", 1)[-1]


def _step(entry: dict[str, Any], what: str) -> float:
    return float(entry[what]) / max(1, int(entry["batches"]))


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
                _short(e["name"]),
                workers,
                f"{e['batches']:,}",
                human_seconds(e["wait_s"]),
                f"{_share(e):.0%}",
                human_seconds(_step(e, "step_s")),
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
            out.append(f"memory of {_short(e['name'])}'s workers (PSS): {together}{sum(pss) >> 20:,} MB")
        out += [f"{_short(e['name'])}: {words}" for words in e.get("decisions", [])[-LAST:]]
        out += [f"{_short(e['name'])}: {words}" for words in _faults(e.get("faults") or {})]
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
    case = Case(main, int(report["machine"].get("cores", 1)))
    said = f"the loop waits for data {case.share:.0%} of its time"
    begins = case.startup / case.total if case.total else 0.0
    if begins >= BEGINS and int(main["epochs"]) > 1:
        said = f"epochs' first batches take {begins:.0%} of the loop's time, and after them it waits {case.share:.0%}"
    return main, said


def _why(report: dict[str, Any]) -> str:
    verdict = report["verdict"]
    main, waits = waited(report)
    if verdict == "healthy":
        return f": your loader is fine, {waits}"
    if verdict == "unknown":
        return f": {main['batches']} batches are too few to tell; let it run for more steps"
    if verdict == "transfer-bound":
        return f": {waits}, and its data crosses to the device too late"
    return f": {waits}" + ("" if report["findings"] else f", and more workers would not help: {_largest(main, report)}")


def _largest(entry: dict[str, Any], report: dict[str, Any]) -> str:
    """What a loop mostly waits for where no rule speaks."""
    if entry["settings"].get("num_workers") == 0:
        return "a sample is so little work that handing it over would cost as much"
    stages, wait = entry["stages"], float(entry["wait_s"])
    made = sum(float(stages.get(stage, {}).get("self_s", 0.0)) for stage in ("fetch", "collate"))
    abreast = max(1, min(int(entry["settings"].get("num_workers") or 1), int(report["machine"].get("cores") or 1)))
    if float(stages.get("startup", {}).get("wait_s", 0.0)) > wait / 2:
        return "most of it goes by before each epoch's first batch, while workers start"
    if made / abreast > wait / 2:
        return "the samples themselves cost too much for the cores granted"
    return "making the samples is the smaller part of it, handing them over the larger"


def _applied(report: dict[str, Any], columns: int, colour: bool) -> list[str]:
    applied = report["applied"]
    before = {e["name"]: e for e in (applied["before"] or {}).get("loaders", [])}
    out = ["", style("before / after", "bold", colour)]
    rows = []
    for e in report["loaders"]:
        old = before.get(e["name"])
        for label, entry in (("before", old), ("after", e)):
            if entry is None:
                continue
            gain = (
                f"{e['samples_per_s'] / old['samples_per_s']:.2f}x"
                if old and label == "after" and old["samples_per_s"]
                else ""
            )
            rows.append(
                [
                    _short(e["name"]),
                    label,
                    str(entry["settings"].get("num_workers", "?")),
                    human_seconds(_step(entry, "wait_s")),
                    human_seconds(_step(entry, "step_s")),
                    f"{entry['samples_per_s']:,.0f}",
                    gain,
                ]
            )
    out.append(table(["loader", "", "workers", "wait/step", "step", "samples/s", "speed-up"], rows, columns))
    if not before:
        out.append("no observed run of this command to compare with: run it once without --apply")
    for f in (applied["before"] or {}).get("findings", []):
        if f.get("predicted_speedup") and f["cause"] in MENDED:
            out.append(f"predicted from the observed run ({f['cause']}): {f['predicted_speedup']:.2f}x")
    for name, change in applied["settings"].items():
        out.append(f"{name}: {change['reason']}")
        if change["from"] != change["to"]:
            now, then = change["from"]["num_workers"], change["to"]["num_workers"]
            out.append("the same in your own code:")
            if change["to"].get("staged"):
                out.append(
                    "  + dataset = stoker.Staged(dataset)    # what is the same in every epoch is kept in memory"
                )
            old, deep = (f", prefetch_factor={change[k].get('prefetch_factor')}" for k in ("from", "to"))
            deeper = "prefetch_factor" in change["to"]
            out.append(f"  - DataLoader(..., num_workers={now}{old if deeper else ''})")
            out.append(
                f'  + stoker.DataLoader(..., num_workers="auto"{deep if deeper else ""})    # {then} here; '
                "sample order unchanged"
            )
    return out
