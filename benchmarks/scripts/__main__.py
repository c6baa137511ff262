"""What a stranger's script gains from one command, typed once: ``python -m benchmarks.scripts run|table``.

Each script of this folder, and the demo's own, runs as it is and under ``stoker run --apply``, in turns: the first
run, with nothing observed before, in a home of its own. The clock is the wall's, from the command to its end.
Epochs are timed by the lines that the scripts print. *Bare* is what the random part alone allows (bare.py): all else is
made beforehand and lies in memory, and torch's loader has no workers, or as many as the script; the faster one counts.
"""

from __future__ import annotations

import csv
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..command import LIMIT_S, ROOT, Line, in_turns, main

HERE = Path(__file__).parent
PHOTOS = Path(os.environ.get("PHOTOS", ROOT / "examples" / "data"))
VOLUMES = ROOT / "benchmarks" / "data" / "volumes"
BOUND_ROUNDS = 10  # where nothing can be gained, a few percent have to be told from noise
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@dataclass(frozen=True)
class Script:
    """A script and what is asked of it.

    Attributes:
        needs: a package that may not be there.
        before: what stands on the command line before it.
        path: where it lies.
        later: how many times faster epochs after the first have to be.
        whole: how many times faster the whole script.
        workers: that it asks for; None: it has no bare counterpart, of which 85 % are asked for.
    """

    needs: str = "PIL"
    before: tuple[str, ...] = ()
    path: Path | None = None
    later: float | None = 4.0
    whole: float = 1.7
    workers: int | None = 1

    @property
    def bare(self) -> tuple[str, ...]:
        """Its bare counterparts: without workers, and with as many as the script has."""
        return () if self.workers is None else tuple(f"bare {n}" for n in dict.fromkeys((0, self.workers)))


SCRIPTS = {
    "pil_compose": Script(workers=2),
    "albumentations_cv2": Script("albumentations"),
    "lightning_module": Script("lightning"),
    "hf_trainer": Script("transformers", later=None, workers=0),
    "monai_dict": Script("monai"),
    "train_lazy": Script(path=ROOT / "examples" / "train_lazy.py"),
    "mosaic": Script(later=3.0, workers=2),
    "ranks": Script(before=TORCHRUN, later=None, whole=1.5),
    "in_ram": Script(later=None, whole=0.97, workers=None),
    "stream": Script(later=None, whole=0.97, workers=None),
    "compute_bound": Script(later=None, whole=0.97, workers=None),
}


def some_photos(folder: Path, count: int) -> None:
    """A folder for the demo's script with the first of its photographs."""
    with open(PHOTOS / "labels.csv", newline="") as file:
        rows = list(csv.DictReader(file))[:count]
    with open(folder / "labels.csv", "w", newline="") as file:
        csv.writer(file).writerows([["path", "label"], *([PHOTOS / row["path"], row["label"]] for row in rows)])


def command(name: str, way: str, folder: Path) -> list[str]:
    """The command line of a contestant; ``folder`` is its working folder."""
    script = SCRIPTS[name]
    args: list[str] = []
    if name == "train_lazy":
        some_photos(folder, 1600)
        args = ["--data", str(folder), "--epochs", "5"]
    if way.startswith("bare"):
        return [sys.executable, *script.before, str(HERE / "bare.py"), name, way.split()[1], *args]
    line = [*script.before, str(script.path or HERE / f"{name}.py"), *args]
    return [sys.executable, *line] if way == "plain" else [sys.executable, "-m", "stoker", "run", "--apply", *line]


def one(contestant: str) -> None:
    """Runs a contestant and prints when its epochs ended, in seconds since the command."""
    name, _, way = contestant.partition(" ")
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "said", "w+") as said:
        env = {**os.environ, "HOME": folder, "XDG_CACHE_HOME": folder, "PHOTOS": str(PHOTOS), "VOLUMES": str(VOLUMES)}
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(HERE), str(ROOT / "examples")])
        line = command(name, way, Path(folder))
        began, ends, loop = time.perf_counter(), [], None
        p = subprocess.Popen(line, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=said, text=True)
        limit = threading.Timer(LIMIT_S - 20, p.kill)  # in_turns would end this process, and not that one
        limit.start()
        assert p.stdout is not None
        for text in p.stdout:
            now = time.perf_counter() - began
            if text.startswith("epoch "):
                ends.append(now)
            elif text == "begin\n":
                loop = now
        code, wall = p.wait(), time.perf_counter() - began
        limit.cancel()
        said.seek(0)
        words = said.read().replace(f"{ROOT}/", "/")  # whose checkout it was concerns nobody
    seen: Line = {"wall": wall, "load": os.getloadavg()[0]}
    if code or len(ends) < 2:
        seen |= {"failed": f"exit code {code}, {len(ends)} epochs", "said": words[-3000:]}
    else:
        seen |= {"first": ends[0] - (loop or 0), "later": [b - a for a, b in itertools.pairwise(ends)]}
        seen |= {"said": words[-2000:]} if way == "applied" else {}
    print(json.dumps(seen), flush=True)


def ready(name: str) -> bool:
    """Whether a script can run here; its data is made, and read once, so that no contestant finds it cold."""
    script = SCRIPTS[name]
    if importlib.util.find_spec(script.needs) is None:
        print(f"scripts: {name} is left out: {script.needs} is not installed (make test-scripts)", file=sys.stderr)
        return False
    if name == "monai_dict" and not VOLUMES.is_dir():
        VOLUMES.parent.mkdir(parents=True, exist_ok=True)
        make = f"import sys; sys.path.insert(0, {str(HERE)!r}); import monai_dict; monai_dict.files()"
        subprocess.run([sys.executable, "-c", make], env={**os.environ, "VOLUMES": str(VOLUMES)}, check=True)
    for path in (*PHOTOS.glob("photos/*.jpg"), *VOLUMES.glob("*")):
        path.read_bytes()
    return True


def measure(rounds: int, names: list[str]) -> Iterator[Line]:
    if not (PHOTOS / "labels.csv").is_file():
        raise SystemExit("no photographs: python examples/make_photos.py --out examples/data")
    for name in names:
        if ready(name):
            ways = ("plain", "applied", *SCRIPTS[name].bare)
            turns = rounds if SCRIPTS[name].bare or rounds < 3 else max(rounds, BOUND_ROUNDS)
            for line in in_turns("scripts", "contestant", [f"{name} {way}" for way in ways], turns):
                script, _, way = line.pop("contestant").partition(" ")
                yield {"script": script, "way": way, **line}


def by_round(lines: list[Line], name: str, way: str, value: Callable[[Line], float]) -> dict[int, float]:
    return {x["round"]: value(x) for x in lines if (x["script"], x["way"]) == (name, way)}


def later(line: Line) -> float:
    """Seconds of an epoch but the first."""
    return statistics.median(line["later"])


def paired(ours: dict[int, float], theirs: dict[int, float]) -> float:
    """How many times faster ours was, each time against its neighbour: the median."""
    return statistics.median(theirs[r] / ours[r] for r in ours.keys() & theirs.keys())


def table(lines: list[Line]) -> str:
    out = [
        "| script | whole, plain | applied | ratio | first epoch, ratio of times | epochs after it, plain | applied "
        "| ratio | bare | of bare | bare, its own workers | of it | |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, script in SCRIPTS.items():
        mine = [x for x in lines if x["script"] == name]
        failed = next((f"{x['way']}: {x['failed']}" for x in mine if "failed" in x), None)
        if not failed and not {"plain", "applied", *script.bare} <= {x["way"] for x in mine}:
            failed = "not measured to its end"
        if mine and failed:
            out.append(f"| {name} | | | | | | | | | | | | FAILED: {failed} |")
        elif mine:
            out.append(row(mine, name, script))
    return "\n".join(out)


def row(lines: list[Line], name: str, script: Script) -> str:
    def of(way: str, value: Callable[[Line], float]) -> dict[int, float]:
        return by_round(lines, name, way, value)

    def seconds(values: dict[int, float]) -> str:
        return f"{statistics.median(values.values()):.2f} s"

    def wall(line: Line) -> float:
        return float(line["wall"])

    whole = paired(of("applied", wall), of("plain", wall))
    first = 1 / paired(of("applied", lambda x: x["first"]), of("plain", lambda x: x["first"]))
    plain, applied = of("plain", later), of("applied", later)
    faster = paired(applied, plain)
    missed = [f"whole script {script.whole}x"] if whole < script.whole else []
    missed += ["first epoch 1.05x"] if first > 1.05 else []
    missed += [f"later epochs {script.later:g}x"] if script.later and faster < script.later else []
    bare = [""] * 4
    if script.bare:
        best = min((of(way, later) for way in script.bare), key=lambda values: statistics.median(values.values()))
        same = of(script.bare[-1], later)
        bare = [x for way in (best, same) for x in (seconds(way), f"{paired(applied, way):.0%}")]
        missed += ["85 % of bare"] if paired(applied, best) < 0.85 else []
    cells: list[Any] = [name, seconds(of("plain", wall)), seconds(of("applied", wall)), f"{whole:.2f}", f"{first:.2f}"]
    cells += [seconds(plain), seconds(applied), f"{faster:.2f}", *bare]
    return f"| {' | '.join(cells)} | {'missed: ' + ', '.join(missed) if missed else 'ok'} |"


if __name__ == "__main__":
    sys.exit(main("scripts", __doc__, measure, table, one, 3, only=SCRIPTS))
