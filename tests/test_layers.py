"""The house: who may import whom, what is public, and what importing costs."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import stoker

SRC = Path(stoker.__file__).parent
BASE = {"errors"}
# A room, and the rooms it may import when it is imported. docs/architecture.md has the layers.
MAY: dict[str, set[str]] = {
    "errors": set(),
    "live": {"inside", "machine", "metrics"},
    "paths": set(),
    "picklable": set(),
    "stacks": {"paths"},
    "looks": {"paths", "stacks"},
    "blame": {"collate", "faults", "paths", "stacks"},
    "debug": {"cursor", "inline"},
    "inside": {"looks", "machine", "stacks"},
    "ambient": {"machine", "nvml"},
    "nvml": set(),
    "arguments": set(),
    "metrics": set(),
    "lifecycle": set(),
    "machine": {"nvml"},
    "source": set(),
    "readahead": BASE,
    "chunks": BASE | {"readahead", "source"},
    "stateful": BASE,
    "randomness": BASE,
    "state": BASE | {"randomness", "stateful"},
    "sampling": BASE | {"randomness", "source", "state", "stateful"},
    "cursor": BASE | {"randomness", "sampling", "state", "stateful"},
    "inline": {"gather", "blame", "cursor", "faults", "nesting", "seeding", "stage", "state", "stateful", "task_seeds"},
    "task_seeds": {"generators", "seeding"},
    "seeding": {"numpy_state"},
    "numpy_state": set(),
    "handles": set(),
    "options": BASE,
    "transport": BASE,
    "collate": {"transport"},
    "gather": set(),
    "generators": {"paths"},
    "image": BASE,
    "files": set(),
    "nesting": set(),
    "cache": BASE | {"machine", "transport"},
    "staging": BASE
    | {"cache", "gather", "generators", "image", "lifecycle", "machine", "numpy_state", "objects", "options", "paths"}
    | {"transport"},
    "faults": BASE | {"lifecycle", "machine", "metrics", "nesting", "options", "stateful"},
    "stage": {"collate", "faults", "gather", "stateful"},
    "workers": BASE
    | {
        "generators",
        "task_seeds",
        "blame",
        "collate",
        "faults",
        "lifecycle",
        "machine",
        "metrics",
        "options",
        "paths",
        "picklable",
        "seeding",
        "source",
        "stage",
        "state",
        "stateful",
        "transport",
    },
    "scheduler": BASE | {"cursor", "metrics", "options", "source", "workers"},
    "pin": BASE | {"blame", "lifecycle", "machine", "nesting", "options", "source", "workers"},
    "objects": {"paths"},
    "shared": BASE,
    "iterators": BASE
    | {
        "cursor",
        "faults",
        "handles",
        "metrics",
        "nesting",
        "objects",
        "options",
        "paths",
        "picklable",
        "pin",
        "pressure",
        "scheduler",
        "source",
        "stage",
        "state",
        "stateful",
        "transport",
        "workers",
    },
    "device": BASE | {"nesting"},
    "copies": {"pin"},
    "pressure": BASE | {"machine"},
    "resident": {"cursor", "gather", "source", "stage", "task_seeds"},
    "engine": BASE
    | {
        "cursor",
        "faults",
        "gather",
        "inline",
        "iterators",
        "lifecycle",
        "machine",
        "metrics",
        "nesting",
        "objects",
        "options",
        "pin",
        "randomness",
        "resident",
        "state",
        "stateful",
        "source",
        "stage",
        "workers",
    },
    "loader": BASE | {"chunks", "device", "engine", "faults", "machine", "options", "resident", "source", "workers"},
    "installation": BASE | {"device", "engine", "faults", "loader", "options", "stage"},
    "tuning": BASE
    | {
        "staging",
        "__init__",
        "arguments",
        "engine",
        "faults",
        "generators",
        "files",
        "gather",
        "handles",
        "inline",
        "lifecycle",
        "loader",
        "machine",
        "options",
        "picklable",
        "report",
        "seeding",
        "source",
        "stateful",
        "transport",
        "workers",
    },
    "ceilings": set(),
    "session": {"ambient", "report", "watching"},
    "watching": BASE | {"observer", "patches", "watch_fetch", "watch_iterators", "watched"},
    "watch_iterators": {
        "ceilings",
        "clock",
        "engine",
        "live",
        "metrics",
        "observer",
        "patches",
        "watch_fetch",
        "watched",
    },
    "patches": set(),
    "clock": {"inside", "metrics", "watch_device"},
    "observer": {"ceilings", "clock", "engine", "live", "machine", "metrics", "watch_device", "watched"},
    "watch_device": {"metrics", "patches", "watched"},
    "watched": {"engine", "options", "paths", "stacks"},
    "watch_fetch": {"live", "patches", "stage"},
    "doctor": set(),
    "report": BASE | {"arguments", "files", "doctor", "inside", "machine"},
    "bench": BASE | {"engine", "installation", "loader", "machine", "options", "report", "tuning", "watched"},
    "bench_cli": BASE | {"arguments", "report"},
    "run": BASE | {"ambient", "doctor", "live", "machine", "nvml", "report"},
    "cli": BASE | {"__init__", "arguments", "bench_cli", "cache_cli", "report", "stats_cli", "tuning", "verify_cli"},
    "verify": BASE | {"__init__", "engine", "faults", "loader", "machine", "options", "seeding", "stage", "tuning"},
    "verify_cli": BASE | {"arguments", "report"},
    "stats": BASE | {"engine", "loader", "machine", "options", "report", "seeding", "tuning"},
    "stats_cli": BASE | {"arguments", "report"},
    "cache_cli": BASE | {"arguments", "cache_text", "report"},
    "cache_text": {"report"},
    "_hook": set(),
    "__main__": {"cli"},
    "__init__": set(),
}
# Only when they are needed, and so not at import: "auto" decides, --apply measures, commands find their clients.
LAZY = {
    ("engine", "tuning"),
    ("loader", "tuning"),
    ("installation", "tuning"),
    ("engine", "debug"),
    ("installation", "staging"),
    ("loader", "installation"),
    ("watching", "debug"),
    ("staging", "pin"),
    ("tuning", "staging"),
    ("watching", "tuning"),
    ("session", "run"),
    ("cli", "run"),
    ("bench_cli", "bench"),
    ("bench_cli", "tuning"),
    ("cli", "machine"),
    ("cli", "copies"),
    ("cli", "files"),
    ("cli", "pin"),
    ("cli", "report"),
    ("_hook", "watching"),
    ("stats_cli", "stats"),
    ("stats_cli", "tuning"),
    ("cache_cli", "cache"),
    ("cache_text", "cache"),
    ("verify_cli", "faults"),
    ("verify_cli", "tuning"),
    ("verify_cli", "verify"),
    ("cache_cli", "staging"),
    ("cache_cli", "tuning"),
    ("staging", "engine"),
    ("staging", "loader"),
}
ROAD = {
    "faults",
    "source",
    "readahead",
    "chunks",
    "seeding",
    "stage",
    "collate",
    "transport",
    "workers",
    "scheduler",
    "pin",
    "iterators",
    "state",
    "sampling",
    "cursor",
    "inline",
}
CLIENTS = {"tuning", "doctor", "report", "run", "cli", "watching"}


def room_of(path: Path) -> str:
    relative = path.relative_to(SRC)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports(path: Path) -> set[tuple[str, bool]]:
    """Rooms that a file imports, and whether only inside a function."""
    tree = ast.parse(path.read_text())
    lazy = {
        id(n) for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef)) for n in ast.walk(f)
    }
    typing = {
        id(n) for i in tree.body if isinstance(i, ast.If) and "TYPE_CHECKING" in ast.dump(i.test) for n in ast.walk(i)
    }
    depth = len(path.relative_to(SRC).parts)
    out: set[tuple[str, bool]] = set()
    for node in ast.walk(tree):
        if id(node) in typing or not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        if isinstance(node, ast.Import):
            names = [a.name.split(".")[1:] for a in node.names if a.name.split(".")[0] == "stoker"]
        elif node.level == 0:
            parts = (node.module or "").split(".")
            names = [[*parts[1:], a.name] for a in node.names] if parts[0] == "stoker" else []
        elif node.level < depth:
            names = [[room_of(path)]]
        else:
            names = [[node.module.split(".")[0]]] if node.module else [[a.name] for a in node.names]
        for name in names:
            room = name[0] if name and ((SRC / name[0]).is_dir() or (SRC / f"{name[0]}.py").is_file()) else "__init__"
            if room != room_of(path):
                out.add((room, id(node) in lazy))
    return out


def test_imports_point_one_way() -> None:
    wrong = []
    for path in SRC.rglob("*.py"):
        room = room_of(path)
        assert room in MAY, (
            f"a new room {room}: say in MAY what it may import, and in docs/architecture.md where it belongs"
        )
        for other, lazy in imports(path):
            if other not in MAY[room] and not (lazy and (room, other) in LAZY):
                wrong.append(f"{path.relative_to(SRC)} imports {other}")
    assert not wrong


def test_no_stage_knows_the_clients() -> None:
    for room in ROAD:
        assert not MAY[room] & CLIENTS
        assert not any((room, client) in LAZY for client in CLIENTS)


def test_there_is_no_circle() -> None:
    seen: dict[str, int] = {}

    def depth(room: str, path: tuple[str, ...] = ()) -> int:
        assert room not in path, path
        if room not in seen:
            seen[room] = 1 + max((depth(r, (*path, room)) for r in MAY[room]), default=0)
        return seen[room]

    for room in MAY:
        depth(room)


def test_the_public_names() -> None:
    """A change here is a change of the promise: say it in CHANGELOG.md."""
    assert stoker.__all__ == [
        "ChunkSampler",
        "DataLoader",
        "FeistelSampler",
        "Staged",
        "StokerError",
        "StokerWarning",
        "empty",
        "install",
        "installed",
        "mean_std",
        "share",
        "split",
        "to_device",
        "tune",
        "uninstall",
        "watch",
        "worth",
    ]
    assert sorted(stoker.__all__) == stoker.__all__
    assert not inspect.signature(stoker.uninstall).parameters
    for name in ("install", "installed"):
        assert list(inspect.signature(getattr(stoker, name)).parameters) == ["defaults"]
    assert issubclass(stoker.StokerError, Exception)
    assert (SRC / "py.typed").exists()


def test_every_file_says_what_it_is_for() -> None:
    for path in SRC.rglob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), path


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout


def test_importing_costs_less_than_fifty_milliseconds_more_than_torch() -> None:
    """One of five processes, on a machine where importing torch takes a second; as a part of that, for a machine
    that is slow at the moment."""
    code = (
        "import time; a = time.perf_counter(); import torch; b = time.perf_counter(); import stoker; stoker.DataLoader;"
        "print((time.perf_counter() - b) / max(1.0, b - a))"
    )
    assert any(float(run(code)) < 0.05 for _ in range(5))


def test_the_command_line_does_not_import_torch() -> None:
    assert (
        run(
            "import stoker.commands.main, stoker.core.resources, stoker.commands.run, sys; print('torch' in sys.modules)"
        )
        == "False\n"
    )


def test_heavy_and_optional_modules_are_lazy() -> None:
    code = "import torch, sys; have = set(sys.modules); import stoker.loader.dataloader, stoker.diagnosis.watch.patch; print(*set(sys.modules) - have)"
    new = {name.split(".")[0] for name in run(code).split()}
    assert not new & {"matplotlib", "ray", "pynvml", "psutil", "torchvision"}
