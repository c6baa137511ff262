"""What a cache on disk depends on: source files, the code that runs and the data it reads, libraries, and the process.

What cannot be compared between two runs is not kept: code that only running finds, results of earlier calls.
"""

from __future__ import annotations

import contextlib
import hashlib
import locale
import os
import platform
import re
import sys
from collections.abc import Collection
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

from ..core.errors import UsageError
from ..core.marked_code import original
from ..core.packages import is_users
from ..core.types import JsonObject
from .inputs import Inputs
from .libraries_used import installed, settings_of, versions_of
from .library_objects import file_stamp, files_read, working_folder
from .source_files import SourceFiles
from .users_code import names_in
from .value_digests import lies_in

READ_BY_LIBRARIES = ("TZ", "LC_", "LANG", "OMP_", "MKL_", "OPENBLAS_", "ATEN_", "TORCH_", "LD_", "NPY_")
# Variables that differ between runs and terminals, and of which no sample is made. Hashes have a part of their own.
OF_A_RUN = re.compile(
    r"_|PWD|OLDPWD|SHLVL|\w*TERM\w*|COLUMNS|LINES|WINDOWID|DISPLAY|\w*_SOCK|\w*_PID|SSH_\w*|TMUX\w*|STY|XDG_\w*|DBUS_\w*|"
    r"VTE_VERSION|VSCODE_\w*|GNOME_\w*|KDE_\w*|INVOCATION_ID|JOURNAL_STREAM|LS_COLORS|PYTHONHASHSEED|STOKER_\w*|SLURM_\w*|"
    r"SLURMD_\w*|PBS_\w*|LSB_\w*|WANDB_\w*|MLFLOW_\w*|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_\w*|TORCHINDUCTOR_\w*|"
    r"CUDA_VISIBLE_DEVICES|PYTEST_\w*"
)
# Builtins that find code or data by a name made at run time; ``model.eval()`` is another function.
BY_NAME = frozenset({"exec", "eval", "__import__", "globals", "locals", "vars"})
# The same of modules and objects.
LOADERS = frozenset(
    {"import_module", "run_path", "run_module", "spec_from_file_location", "exec_module", "load_module", "find_class"}
    | {
        "locate",
        "resolve_name",
        "entry_points",
        "attrgetter",
        "getmembers",
        "__globals__",
        "__subclasses__",
        "__dict__",
    }
    | {"__subclasses__", "CDLL", "PyDLL", "cdll", "LoadLibrary", "dlopen"}
    | {"get_type_hints", "signature", "getdoc", "parse_args", "parse_known_args", "fileinput", "get_worker_info"}
)


def key_of(
    inputs: Inputs, opened: Collection[str], sources: SourceFiles, samples: int, extra: str, cut: str
) -> JsonObject:
    """Builds the key of a cache. ``inputs``: made with ``across_runs``; ``opened``: paths of what loading samples
    creates; ``extra``: the user's own text; ``cut``: the part of the code that makes the cached samples."""
    held, code = inputs.keys(opened)
    stamps = repr(sorted(sources.stamps.items())).encode()
    return {
        "samples": samples,
        "the source files": hashlib.sha256(stamps).hexdigest()[:32],
        "what the dataset holds": held,
        "the code": hashlib.sha256((cut + code).encode()).hexdigest()[:32],
        "libraries": {
            "python": ".".join(platform.python_version_tuple()[:2]),
            **versions_of({"torch", "numpy"} | inputs.packages),
        },
        "native modules": _native_modules(inputs.packages),
        "machine": _machine(),
        # Hashes differ between processes, unless PYTHONHASHSEED is set, and so does the order of a set of strings.
        "hashes": str(hash("seed")) if inputs.depends_on_hashes else "",
        "extra": extra,
    }


def of_process(inputs: Inputs, base: Path) -> JsonObject:
    """More parts of the key of a cache that nobody asked for: what any code of the process may read. ``base``: folder
    of all caches."""
    variables = sorted((k, v) for k, v in os.environ.items() if not OF_A_RUN.fullmatch(k))
    return {
        "environment": _digest((variables, str(sys.flags), working_folder())),
        "files open for reading": _digest(files_read(inputs.numbers, base)),
        "installed": _digest(installed()),
        "settings of libraries": _digest(settings_of(inputs.packages)),
    }


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def why_not_kept(inputs: Inputs, opened: Collection[str]) -> str:
    """Why a later run could not tell whether samples are still right; "" if it can. The arguments are those of
    ``key_of``."""
    for fn in inputs.functions.values():
        read, mentioned, _ = names_in(original(fn.__code__))
        found = (BY_NAME & read) | (LOADERS & mentioned)
        if found:
            return f"{fn.__qualname__} uses {min(found)}, so what it reads is known only while it runs"
    for cache in inputs.caches:
        if cache.cache_info().currsize:
            return f"{cache.__qualname__} caches results of calls before the first epoch"
    return next((why for path, why in inputs.opaque.items() if not lies_in(path, opened)), "")


def _native_modules(packages: Collection[str]) -> str:
    """Digest of the stamps of the user's own extension modules, which have no version and may be built again."""
    files = {
        str(file)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in packages and (file := getattr(module, "__file__", None))
    }
    natives = sorted(file for file in files if file.endswith(tuple(EXTENSION_SUFFIXES)) and is_users(file))
    return _digest([file_stamp(file) for file in natives]) if natives else ""


def _machine() -> str:
    """Digest of what native code may depend on: the processor's instructions, how many threads share a sum, torch's
    settings, and variables of the environment that libraries read themselves."""
    flags = ""
    with contextlib.suppress(OSError, StopIteration):
        text = Path("/proc/cpuinfo").read_text()
        flags = next(line for line in text.splitlines() if line.startswith(("flags", "Features")))
    cudnn = torch.backends.cudnn
    of_cudnn = cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    settings = (
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,
        torch.get_num_threads(),
        of_cudnn,
    )
    variables = sorted((k, v) for k, v in os.environ.items() if k.startswith(READ_BY_LIBRARIES))
    found = platform.machine(), flags, settings, variables, locale.setlocale(locale.LC_ALL)
    return _digest(found)


def name_of(dataset: object) -> str:
    """A folder name for a cache."""
    kind = "paths" if isinstance(dataset, (list, tuple)) else type(dataset).__name__
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", kind)[:40]
    if not name:
        raise UsageError("the class of the dataset has no name")
    return name
