"""What a run leaves for the next one, and for others at the same time: ``python -m benchmarks.runs run|table``.

The demo's script with 1,600 photographs, five epochs, whole processes, in turns: plain; ``stoker run --apply``; with
``--keep disk`` and nothing kept yet (*fills*); with what that run left (*second*). Then four of them at once: plain,
without ``--keep``, with nothing kept yet, and with what one run left. Each contestant has a home of its own. *Same*:
the script printed what it prints without stoker, in each of its runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from stoker.staging.store.manage import listed

from .command import LIMIT_S, ROOT, Line, in_turns, main
from .scripts.__main__ import SCRIPTS, some_photos

PHOTOS = 1600
KEPT_S = 60  # how long a writer of the lowest priority may take
WANTED = {  # the most that a contestant's seconds may be, of plain
    "fills": {"first": 1.05},
    "second": {"wall": 1 / 3, "first": 0.25},
    "four fill": {"wall": 0.4},
    "four after one": {"wall": 0.4},
}


def command(folder: Path, keep: str | None) -> list[str]:
    script = [str(SCRIPTS["train_lazy"].path), "--data", str(folder), "--epochs", "5"]
    if keep is None:
        return [sys.executable, *script]
    return [sys.executable, "-m", "stoker", "run", "--apply", "--keep", keep, "--json", os.devnull, *script]


def at_once(folder: Path, keep: str | None, runs: int) -> Line:
    """Runs so many of them; returns the seconds until the last has ended, and those of the slowest first epoch."""
    env = {**os.environ, "HOME": str(folder), "XDG_CACHE_HOME": str(folder), "PYTHONPATH": str(ROOT / "src")}
    env.pop("STOKER_CACHE", None)
    line, began = command(folder, keep), time.perf_counter()
    started = [
        subprocess.Popen(line, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for _ in range(runs)
    ]
    limits = [threading.Timer(LIMIT_S / 2 - 20, p.kill) for p in started]
    seen: list[list[tuple[float, str]]] = [[] for _ in started]

    def read(k: int) -> None:
        stdout = started[k].stdout
        assert stdout is not None
        seen[k] += ((time.perf_counter() - began, text) for text in stdout)

    readers = [threading.Thread(target=read, args=(k,)) for k in range(runs)]
    for thread in (*limits, *readers):
        thread.start()
    codes = [p.wait() for p in started]
    wall = time.perf_counter() - began
    for thread in readers:
        thread.join()
    for limit in limits:
        limit.cancel()
    if any(codes):
        raise RuntimeError(f"exit codes {codes}")
    said = [[text for _, text in lines] for lines in seen]
    return {"wall": wall, "first": max(lines[0][0] for lines in seen), "said": said, "load": os.getloadavg()[0]}


def wait_until_kept(folder: Path) -> None:
    end = time.monotonic() + KEPT_S
    while time.monotonic() < end:
        with contextlib.suppress(OSError, ValueError):
            places = [np.load(cache.path / "place.npy") for cache in listed(folder / "stoker" / "staged")]
            if sum(map(np.count_nonzero, places)) >= PHOTOS:
                return
        time.sleep(0.1)
    raise RuntimeError("nothing was kept")


def one(contestant: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        some_photos(folder, PHOTOS)
        runs = 4 if contestant.startswith("four") else 1
        if contestant in ("second", "four after one"):
            at_once(folder, "disk", 1)
            wait_until_kept(folder)
        keep = {"plain": None, "four plain": None, "applied": "no", "four applied": "no"}.get(contestant, "disk")
        print(json.dumps(at_once(folder, keep, runs)), flush=True)


def measure(rounds: int) -> Iterator[Line]:
    names = ("plain", "applied", "fills", "second", "four plain", "four applied", "four fill", "four after one")
    for line in in_turns("runs", "contestant", names, rounds):
        said = line.pop("said")
        yield {**line, "said": said[0], "same": all(x == said[0] for x in said)}


def table(lines: list[Line]) -> str:
    out = [
        "| | seconds | first epoch ends | of plain | its first epoch | wanted | same | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    plain = next(x["said"] for x in lines if x["contestant"] == "plain")
    for name in dict.fromkeys(x["contestant"] for x in lines):
        mine = [x for x in lines if x["contestant"] == name]
        beside = "four plain" if name.startswith("four") else "plain"
        ratio = {value: _ratio(lines, name, beside, value) for value in ("wall", "first")}
        wanted = WANTED.get(name, {})
        asked = [
            f"{'first epoch' if value == 'first' else 'whole'} {most:.2f} or less" for value, most in wanted.items()
        ]
        missed = any(ratio[value] > most for value, most in wanted.items())
        same = all(x["same"] and x["said"] == plain for x in mine)
        cells: list[Any] = [name, *(f"{statistics.median(x[value] for x in mine):.1f}" for value in ("wall", "first"))]
        cells += [f"{ratio['wall']:.2f}", f"{ratio['first']:.2f}", ", ".join(asked), "yes" if same else "NO"]
        out.append(f"| {' | '.join(cells)} | {('missed' if missed else 'ok') if asked else ''} |")
    return "\n".join(out)


def _ratio(lines: list[Line], name: str, beside: str, value: str) -> float:
    """The median over rounds, each time against its neighbour."""
    of = {(x["contestant"], x["round"]): float(x[value]) for x in lines}
    rounds = {x["round"] for x in lines}
    return statistics.median(of[name, r] / of[beside, r] for r in rounds if (name, r) in of and (beside, r) in of)


if __name__ == "__main__":
    sys.exit(main("runs", __doc__, measure, table, one, 3))
