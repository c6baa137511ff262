"""``reference/causes.md``: what ``stoker run`` can find, from the rules that find it."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stoker.diagnosis.doctor.verdict import FIRST, LAST, REMEDY, RULES

from . import Uncovered, code

ROOT = Path(__file__).parents[2]
CASES = ROOT / "tests" / "diagnosis" / "cases"
ROW = re.compile(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", re.MULTILINE)  # of the table in docs/doctor.md


def page() -> dict[str, str]:
    """The page; raises ``Uncovered`` for a rule that docs/doctor.md has no row of, and for a row without a rule."""
    rules = {rule.__name__: rule for rule in (*RULES, FIRST, LAST, REMEDY)}
    rows = {name: (when, fix) for name, when, fix in ROW.findall((ROOT / "docs" / "doctor.md").read_text())}
    if set(rows) != set(rules):
        raise Uncovered(f"causes in docs/doctor.md and rules differ: {sorted(set(rows) ^ set(rules))}")
    truth = json.loads((CASES.parent / "truth.json").read_text())
    lines = [
        "# Causes",
        "",
        "What `stoker run` can find. A report names the cause, and `evidence` in its JSON has the numbers below.",
        "[Why does my training loop wait?](../doctor.md) explains how to read it.",
        "",
    ]
    for name, rule in sorted(rules.items()):
        when, fix = rows[name]
        lines += [f"## {name}", "", " ".join((rule.__doc__ or "").split()), "", f"**Found when:** {when}.", ""]
        lines += [f"**Fix:** {fix}.", ""]
        said, evidence = _found(rule)
        if said:
            lines += ["**The report says:**", "", *(f"- {text}" for text in said), ""]
        if evidence:
            lines += [f"**Evidence:** {', '.join(map(code, evidence))}.", ""]
        lines += _example(name, truth)
    return {"reference/causes.md": "\n".join(lines)}


def _found(rule: Callable[..., Any]) -> tuple[list[str], list[str]]:
    """The sentences that a rule gives as a fix, with "…" for what it fills in, and the keys of its evidence."""
    said: list[str] = []
    keys: list[str] = []
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(rule)))):
        if not isinstance(node, ast.Call) or getattr(node.func, "id", "") != "RuleFinding":
            continue
        if len(node.args) > 2 and (text := sentence(node.args[2])):
            said.append(text)
        if len(node.args) > 1 and isinstance(node.args[1], ast.Dict):
            keys += [k.value for k in node.args[1].keys if isinstance(k, ast.Constant) and isinstance(k.value, str)]
    return list(dict.fromkeys(said)), list(dict.fromkeys(keys))


def sentence(node: ast.expr) -> str:
    """The text of a string or an f-string, with "…" for each value; "" if it is neither, or nothing else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if not isinstance(node, ast.JoinedStr):
        return ""
    parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
    text = "".join(map(str, parts))
    return text if re.search(r"[a-z]{3}", text) else ""


def _example(name: str, truth: dict[str, list[str]]) -> list[str]:
    for case, causes in sorted(truth.items()):
        if causes == [name] and (CASES / f"{case}.py").is_file():
            path = (CASES / f"{case}.py").relative_to(ROOT)
            return [
                f'??? example "A script with this cause: `{path}`"',
                "",
                "    ```python",
                f'    --8<-- "{path}"',
                "    ```",
                "",
            ]
    return []
