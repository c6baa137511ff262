"""``reference/environment.md``: the environment variables that stoker reads or sets."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import stoker

from . import Uncovered, code, table

SRC = Path(stoker.__file__).parents[1]
NAME = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+_?|RANK|TERM|COLUMNS")
NO_VARIABLES = re.compile(r"(RLIMIT|SC|SIG|LOAD|STORE|IMPORT|MAX)_.*")  # of limits, sysconf, bytecode, Pillow

YOURS = {
    "STOKER_CACHE": "The folder of caches on disk. If it is set, `stoker.Staged` caches on disk unless `cache=` "
    "says otherwise; [caching](../staging.md).",
    "XDG_CACHE_HOME": "`stoker run` remembers observed runs in `stoker/runs` there. Caches on disk are in "
    "`stoker/staged`, unless `STOKER_CACHE` is set. Default: `~/.cache`.",
    "MALLOC_TRIM_THRESHOLD_": "glibc's: a process returns freed memory beyond this many bytes to the kernel. If it is "
    "set, `--apply` does not change it; else it sets 128 MB.",
    "MALLOC_MMAP_THRESHOLD_": "glibc's: larger blocks are mapped, each by itself. The same; else 32 MB.",
    "GLIBC_TUNABLES": "The same, if it sets anything in `glibc.malloc`.",
    "NO_COLOR": "If it is set, stoker prints no colours. Output to a pipe or a file never has any.",
    "COLUMNS": "The width of a report's text, 40 to 120; default: the terminal's width, else 80.",
    "TERM": "`dumb` prints no colours.",
}
LAUNCHERS = {
    "CUDA_VISIBLE_DEVICES": "The GPUs that a report counts as the script's.",
    "RANK": "The rank of this process in the report.",
    "WORLD_SIZE": "The number of ranks in the report.",
    "LOCAL_RANK": "With `WORLD_SIZE`, shows whether all ranks are on this machine.",
    "LOCAL_WORLD_SIZE": "How many ranks share the cores and the memory of this node (torchrun).",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "The same, from Open MPI.",
    "SLURM_STEP_TASKS_PER_NODE": "The same, from Slurm.",
    "MASTER_ADDR": "Where ranks meet: shows whether all are on this machine, and which ranks share a cache.",
    "MASTER_PORT": "Which ranks share a cache.",
    "TORCHELASTIC_RESTART_COUNT": "How often torchrun has restarted the ranks.",
    "RAY_ADDRESS": 'The cluster, if `worker_method="ray"` names none; [other machines](../cluster.md).',
}
OWN = {
    "STOKER_RUN": "The folder of the run's sockets: `stoker run` listens on one; ranks meet at the others.",
    "STOKER_HOME": "The folder from which the watched process imports stoker.",
    "STOKER_APPLY": "`1`: with `--apply`.",
    "STOKER_KEEP": "The value of `--keep`.",
    "STOKER_ON_MISMATCH": "`stop`: with `--on-mismatch stop`.",
    "STOKER_DEBUG": "`1`: with `--debug`.",
    "STOKER_MAX_STEPS": "The value of `--max-steps`.",
    "STOKER_WORKERS_ON": "The value of `--workers-on`.",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "`0` for Ray: it leaves `CUDA_VISIBLE_DEVICES` to the script.",
    "PYTHONPATH": "stoker puts the folder that starts the watch first; the previous value stays behind it.",
}
BY_LIBRARIES = {"XDG_CACHE_HOME", "NO_COLOR", "TERM", "COLUMNS"}  # read by platformdirs and rich


def found() -> set[str]:
    """Names of environment variables in the source: texts in capitals, in modules that read the environment."""
    out = set()
    for path in SRC.rglob("*.py"):
        text = path.read_text()
        out |= set(re.findall(r"\bSTOKER_[A-Z_]+\b", text))
        if "environ" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and NAME.fullmatch(node.value):
                out.add(node.value)
    return {name for name in out if not NO_VARIABLES.fullmatch(name)} | {"PYTHONPATH"}


def page() -> dict[str, str]:
    """The page; raises ``Uncovered`` for a variable without a row."""
    there = found() | BY_LIBRARIES
    if missing := there - {*YOURS, *LAUNCHERS, *OWN}:
        raise Uncovered(f"docs/generate/variables.py lacks {sorted(missing)}")
    lines = ["# Environment variables", ""]
    for title, names in (
        ("Yours to set", YOURS),
        ("Set by launchers, read by stoker", LAUNCHERS),
        ("Set by stoker run for the script", OWN),
    ):
        rows = [[code(name), meaning] for name, meaning in names.items() if name in there]
        lines += [f"## {title}", "", table(["variable", "meaning"], rows)]
    return {"reference/environment.md": "\n".join(lines)}
