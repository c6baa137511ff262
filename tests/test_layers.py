"""The packages: who may import whom, what is public, and what importing costs."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import stoker

SRC = Path(stoker.__file__).parent
RAY = SRC.parent / "stoker_ray"  # of its own, named by an entry point; what of stoker it uses:
USED_BY_RAY = {"core", "sampling", "transport", "workers", "staging"}
# Each package may import those to its left. sampling and transport do not know each other.
LINE = "core < sampling, transport < workers < device < loader < staging < tuning < diagnosis < integrations < commands"
LEVEL = {name: level for level, names in enumerate(LINE.split(" < ")) for name in names.split(", ")}
TORCHLESS = (
    "errors",
    "files",
    "options",
    "terminal",
    "progress",
    "output",
    "resources",
    "gpus",
    "monitor",
    "processes",
)


def module_of(path: Path) -> str:
    parts = path.relative_to(SRC.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = [path for root in (SRC, RAY) for path in sorted(root.rglob("*.py"))]
MODULES = {module_of(path): path for path in FILES}


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def package_of(module: str) -> str:
    """``core`` of ``stoker.core.files``; empty for ``stoker`` itself and its ``__main__``."""
    root, _, name = module.partition(".")
    return name.partition(".")[0] if root == "stoker" and name.partition(".")[0] in LEVEL else ""


@functools.cache
def imports(module: str) -> dict[str, int]:
    """The modules of stoker that a module imports, also inside functions and for types, with the line."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    out: dict[str, int] = {}
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names]
        else:
            continue
        out.update({name: node.lineno for name in names if name in MODULES and name != module})
    return out


def circle(graph: dict[str, set[str]]) -> list[str]:
    """A circle of arrows, its first node also at its end; empty where there is none."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        found: list[str] = []
        if node not in done:
            found = next(filter(None, (visit(other, [*path, node]) for other in sorted(graph[node]))), [])
            done.add(node)
        return found

    return next(filter(None, (visit(node, []) for node in graph)), [])


def test_packages_stand_in_one_line_and_modules_in_no_circle() -> None:
    """No import points to the right, not even one inside a function or for types only. ``-s`` shows the graph."""
    found = circle({module: set(imports(module)) for module in MODULES})
    assert not found, " -> ".join(found)
    graph: dict[str, set[str]] = {name: set() for name in LEVEL}
    upwards = []
    for module in filter(package_of, MODULES):
        for other, line in imports(module).items():
            mine, theirs = package_of(module), package_of(other)
            if mine == theirs:
                continue
            if theirs:
                graph[mine].add(theirs)
            if not theirs or LEVEL[theirs] >= LEVEL[mine]:
                upwards.append(f"{MODULES[module].relative_to(SRC)}:{line} imports {other}")
    round_trip = circle(graph)
    print(LINE)
    for name, others in graph.items():
        print(f"{name:>10} -> {', '.join(sorted(others, key=lambda x: LEVEL[x])) or '-'}")
    levels, edges = len(set(LEVEL.values())), sum(map(len, graph.values()))
    print(f"{len(graph)} packages on {levels} levels, {edges} edges", end="")
    print(f"; {int(bool(round_trip))} circles, {len(upwards)} edges upwards")
    assert not upwards
    assert not round_trip


def test_ray_is_known_by_an_entry_point_only() -> None:
    """``stoker_ray`` stands on stoker; no file of stoker names it or Ray in its code."""
    used = {package_of(other) for module in MODULES if module.startswith("stoker_ray.") for other in imports(module)}
    assert used - {""} == USED_BY_RAY
    own = [path for path in FILES if path.is_relative_to(SRC)]
    assert not [path for path in own if re.search(r"^\s*(import|from) (stoker_)?ray\b", path.read_text(), re.MULTILINE)]
    assert [point.name for point in entry_points(group="stoker.workers")] == ["ray"]


def test_the_top_level_holds_the_packages_and_little_else() -> None:
    there = {path.name for path in SRC.iterdir() if path.name != "__pycache__"}
    assert there == {*LEVEL, "__init__.py", "__main__.py", "py.typed"}
    text = (SRC.parents[1] / "docs" / "architecture.md").read_text()
    assert LINE in re.sub(r"\s+", " ", text)


def test_package_files_import_nothing() -> None:
    for path in (path for path in FILES if path.name == "__init__.py"):
        if path.parent != SRC and path.parent.name != "tuning":
            assert not imports(module_of(path)), path


def test_the_public_names() -> None:
    """A change here is a change of the promise: say it in CHANGELOG.md."""
    assert stoker.__all__ == [
        "AllRanks",
        "DataLoader",
        "FeistelSampler",
        "Staged",
        "StokerError",
        "StokerWarning",
        "empty",
        "install",
        "installed",
        "mean_std",
        "shard",
        "share",
        "split",
        "to_device",
        "tune",
        "uninstall",
        "watch",
    ]
    assert sorted(stoker.__all__) == stoker.__all__
    assert not inspect.signature(stoker.uninstall).parameters
    for name in ("install", "installed"):
        assert list(inspect.signature(getattr(stoker, name)).parameters) == ["defaults"]
    assert issubclass(stoker.StokerError, Exception)
    for name in stoker.__all__:
        assert getattr(stoker, name).__name__ == name


def test_documented_modules_are_found_by_their_short_names() -> None:
    assert stoker.bench.measure


def test_every_file_says_what_it_is_for() -> None:
    for path in FILES:
        assert path.read_text().startswith(('"""', 'r"""')), path


Function = ast.FunctionDef | ast.AsyncFunctionDef
BRANCHES = (
    ast.If,
    ast.IfExp,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
    ast.With,
    ast.AsyncWith,
    ast.Assert,
)
LINES, COMPLEXITY, ANYS = 50, 20, 190
# Functions that still exceed a limit. These lists only become shorter.
LONG = {"loader/dataloader.py:__init__"}  # as many lines as arguments
COMPLEX: set[str] = set()


@functools.cache
def functions() -> list[tuple[str, Function]]:
    return [
        (f"{path.relative_to(SRC if path.is_relative_to(SRC) else SRC.parent)}:{node.name}", node)
        for path in MODULES.values()
        for node in ast.walk(parsed(path))
        if isinstance(node, Function)
    ]


def complexity(function: Function) -> int:
    """Branches and boolean terms, those of functions inside it among them."""
    total = 1
    for node in ast.walk(function):
        if isinstance(node, ast.BoolOp):
            total += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            total += len(node.ifs)
        else:
            total += isinstance(node, BRANCHES)
    return total


def test_a_type_name_means_one_thing() -> None:
    where: dict[str, set[str]] = {}
    for path in SRC.parent.rglob("*.py"):
        tree = parsed(path)
        names = [n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
        aliases = [t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)]
        for name in names + [a for a in aliases if a[0].isupper() and not a.isupper()]:
            where.setdefault(name, set()).add(str(path.relative_to(SRC.parent)))
    assert not {name: sorted(found) for name, found in where.items() if len(found) > 1}


def test_no_function_is_long() -> None:
    long = {name: n for name, node in functions() if (n := node.end_lineno - node.lineno + 1) > LINES}  # type: ignore[operator]
    print(len(functions()), "functions; over", LINES, "lines:", long)
    assert set(long) == LONG, "shorten a new one; strike from LONG what is short now"


def test_no_function_is_complex() -> None:
    complex_ = {name: n for name, node in functions() if (n := complexity(node)) > COMPLEXITY}
    print("complexity over", COMPLEXITY, complex_)
    assert set(complex_) == COMPLEX, "simplify a new one; strike from COMPLEX what is simple now"


def test_what_is_of_any_type_becomes_less() -> None:
    """A new ``Any`` wants a type of ``core/types.py``, ``object``, a type variable or a protocol instead."""
    found = sum(len(re.findall(r"\bAny\b", path.read_text())) for path in MODULES.values())
    print(found, "times Any")
    assert found <= ANYS


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.slow
@pytest.mark.alone
def test_importing_costs_less_than_fifty_milliseconds_more_than_torch() -> None:
    """Of processor time, in one of five processes, on a machine where importing torch takes a second; as a part of that,
    for a machine that is slow at the moment."""
    code = (
        "import time; a = time.process_time(); import torch; b = time.process_time(); import stoker; stoker.DataLoader;"
        "print((time.process_time() - b) / max(1.0, b - a))"
    )
    assert any(float(run(code)) < 0.05 for _ in range(5))


def test_the_command_line_does_not_import_torch() -> None:
    core = ", ".join(f"stoker.core.{name}" for name in TORCHLESS if (SRC / "core" / f"{name}.py").is_file())
    code = f"import stoker.commands.main, stoker.commands.run, {core}, sys; print('torch' in sys.modules)"
    assert run(code) == "False\n"


@pytest.mark.slow
def test_heavy_and_optional_modules_are_lazy() -> None:
    code = (
        "import torch, sys; have = set(sys.modules); import stoker.loader.dataloader, stoker.diagnosis.watch.patch;"
        "print(*set(sys.modules) - have)"
    )
    new = {name.split(".")[0] for name in run(code).split()}
    assert not new & {"matplotlib", "ray", "pynvml", "psutil", "torchvision", "click", "jinja2", "rich"}
