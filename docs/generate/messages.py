"""``reference/messages.md``: errors and warnings by class, with what to do, from the places that raise them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import stoker
from stoker.core import errors

from . import Uncovered, code, title
from .causes import sentence

SRC = Path(stoker.__file__).parents[1]
WHAT_TO_DO = {
    "StokerError": "The base class of all errors below: `except stoker.StokerError` catches what stoker raises itself. "
    "Errors from your own code, and from torch's loader, keep their types.",
    "UsageError": "Change the argument that the message names; it says which values are allowed. A command ends with "
    "exit code 2. It is a `ValueError`.",
    "BudgetError": "Ask for less, or raise the limit: the message has both numbers. It is a `MemoryError`.",
    "StaleCacheError": "`--on-mismatch stop` ended the run: an input of the dataset changed without stoker's notice. "
    "Epochs since the cache was filled may have had wrong samples; [the rules](../concepts/exact.md) say what it sees.",
    "StateError": "Load a state from this loader, or from one with the same dataset and order. A state from a newer "
    "stoker needs that version. It is a `ValueError`.",
    "TransportError": "A message between processes was damaged: it is a bug in stoker, or something else writes to its "
    "memory. Run with `debug=True`, and report it.",
    "WorkerDiedError": "The message says how the worker ended. Killed for memory: fewer workers, or smaller batches. "
    "Killed by a sample: the message names it; `stoker verify` lists all; `on_error=` continues without them.",
    "WorkerTimeoutError": "No batch came in time: a larger `timeout=`, or `sample_timeout=`, which names the sample.",
    "SampleError": "More samples failed than `max_errors=` allows. Fix those that the message and the quarantine file "
    "list, or allow more.",
    "SampleTimeoutError": "The sample that the message names took longer than `sample_timeout=`. Its worker's stack "
    "shows where.",
    "StokerWarning": "The run continues. The sentence says what may differ from what you meant.",
}
PAGES = {  # where what a part of the source is about is explained; the longest that fits
    "commands/": "commands.md",
    "core/": "dataloader.md",
    "device/": "../gpu.md",
    "diagnosis/": "../doctor.md",
    "diagnosis/report/compare.py": "../compare.md",
    "diagnosis/hang/": "../why.md",
    "integrations/": "../loggers.md",
    "loader/": "dataloader.md",
    "sampling/": "../resume.md",
    "staging/": "../staging.md",
    "transport/": "../architecture.md",
    "tuning/": "../tune.md",
    "tuning/batch_size.py": "../batch-size.md",
    "workers/": "../faults.md",
    "stoker_ray/": "../cluster.md",
}


def classes() -> dict[str, type]:
    return {
        name: cls
        for name, cls in vars(errors).items()
        if inspect.isclass(cls) and issubclass(cls, (errors.StokerError, errors.StokerWarning))
    }


def said() -> Iterator[tuple[str, str, str]]:
    """Class, file and text of each place that raises or warns; the text is "" where it is put together elsewhere."""
    names = classes()
    for path in sorted(SRC.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            kind = "StokerWarning" if name == "warn_user" else name
            if kind in names and name != "StokerWarning" and node.args:
                yield kind, path.relative_to(SRC).as_posix().removeprefix("stoker/"), sentence(node.args[0])


def page() -> dict[str, str]:
    """The page; raises ``Uncovered`` for a class of errors, or a part of the source, that has no words here."""
    known = classes()
    if missing := set(known) - set(WHAT_TO_DO):
        raise Uncovered(f"WHAT_TO_DO in docs/generate/messages.py lacks {sorted(missing)}")
    messages: dict[str, dict[str, list[str]]] = {name: {} for name in known}
    for kind, file, text in said():
        fits = [part for part in PAGES if file.startswith(part)]
        if not fits:
            raise Uncovered(f"PAGES in docs/generate/messages.py: nothing explains src/stoker/{file}")
        if len(text.replace("…", "").split()) > 2:
            messages[kind].setdefault(PAGES[max(fits, key=len)], []).append(text)
    lines = ["# Errors and warnings", "", "Every message says what is wrong, with the number, and what to do. "]
    lines += ["`…` stands for what stoker fills in. Search this page for the rest.", ""]
    for name, cls in known.items():
        doc = (inspect.getdoc(cls) or "").partition("\n\n")[0]
        lines += [f"## {name}", "", " ".join(doc.split()), "", f"**What to do:** {WHAT_TO_DO[name]}", ""]
        for about, texts in sorted(messages[name].items()):
            lines += [
                f"About these: [{title(about)}]({about})",
                "",
                *(f"- {code(t)}" for t in dict.fromkeys(texts)),
                "",
            ]
    return {"reference/messages.md": "\n".join(lines)}
