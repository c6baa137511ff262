"""``reference/dataloader.md``: the arguments of ``stoker.DataLoader`` in groups, from its signature and docstring."""

from __future__ import annotations

import inspect
import re

from stoker.loader.dataloader import OWN, DataLoader

from . import Uncovered, code, linked, table

# Arguments that only stoker has, by what they are for; all others are torch's.
GROUPS = {
    "Speed": ("worker_method", "read_threads", "budget"),
    "Faults": ("on_error", "refill", "max_errors", "quarantine", "on_worker_death", "sample_timeout", "debug"),
    "Resume": ("task_seeds", "snapshot_every_n_steps"),
    "Device": ("device", "transform_on_device"),
}
ABOUT = {
    "Torch's": 'Values that torch accepts mean the same as in torch. Some arguments accept more: `num_workers="auto"`, '
    '`shuffle="feistel"` and `pin_memory="auto"`.',
    "Speed": "[How many workers?](../tune.md) · [Caching](../staging.md)",
    "Faults": "[Keep a run going when samples or workers fail](../faults.md)",
    "Resume": "[Resume a run](../resume.md)",
    "Device": "[With a GPU](../gpu.md)",
}
METHODS = ("state_dict", "load_state_dict", "resize", "decisions")


def meanings() -> dict[str, str]:
    """What the docstring says of each argument."""
    doc = inspect.getdoc(DataLoader) or ""
    section = re.search(r"^Args:\n(.*?)\n\n", doc, re.DOTALL | re.MULTILINE)
    if section is None:
        raise Uncovered("stoker.DataLoader's docstring has no Args")
    out = {}
    for entry in re.split(r"\n(?=    \S)", section[1]):
        names, _, meaning = entry.strip().partition(":")
        for name in names.split(","):
            out[re.sub(r"\(.*\)", "", name).strip()] = " ".join(meaning.split())
    return out


def page() -> dict[str, str]:
    """The page; raises ``Uncovered`` for an argument without a group or a meaning."""
    parameters = inspect.signature(DataLoader).parameters
    grouped = {name for names in GROUPS.values() for name in names}
    if missing := set(OWN) - grouped:
        raise Uncovered(f"GROUPS in docs/generate/arguments.py lack {sorted(missing)}")
    said = meanings()
    if missing := set(parameters) - set(said):
        raise Uncovered(f"stoker.DataLoader's docstring says nothing of {sorted(missing)}")
    groups = {"Torch's": tuple(name for name in parameters if name not in grouped), **GROUPS}
    lines = ["# stoker.DataLoader", "", (inspect.getdoc(DataLoader) or "").partition("\nArgs:")[0]]
    for group, names in groups.items():
        rows = []
        for name in (name for name in names if name in parameters):
            default = parameters[name].default
            shown = "" if default is inspect.Parameter.empty else code(repr(default))
            rows.append([f"`{name}`{{ #{name} }}", shown, linked(said[name])])
        lines += [f"## {group} arguments", "", ABOUT[group], "", table(["argument", "default", "meaning"], rows)]
    lines += ["## Methods and attributes", ""]
    for name in METHODS:
        lines += [f"::: stoker.loader.dataloader.DataLoader.{name}", ""]
    lines += ["## Errors", "", *_raises(), ""]
    return {"reference/dataloader.md": "\n".join(lines)}


def _raises() -> list[str]:
    doc = inspect.getdoc(DataLoader) or ""
    found = re.search(r"^Raises:\n(.*?)\n\n", doc, re.DOTALL | re.MULTILINE)
    entries = re.split(r"\n(?=    \S)", found[1]) if found else []
    rows = []
    for entry in entries:
        names, _, meaning = entry.strip().partition(":")
        rows.append([", ".join(code(name.strip()) for name in names.split(",")), meaning])
    return [table(["error", "when"], rows)]
