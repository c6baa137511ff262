"""``reference/report-schema.md``: the types of the report's keys, from the source."""

from __future__ import annotations

import inspect
import re
import typing
from pathlib import Path
from typing import Any

import msgspec

from stoker.diagnosis.report import schema

from . import Uncovered, code, table

DOCUMENTED = Path(__file__).parents[1] / "report.md"
INTRO = """# Types of the report

[The report](../report.md) explains what the keys mean. These are their types and defaults, from the code that reads and
judges. `schema` is {number} now.
"""


def page() -> dict[str, str]:
    """The page; raises ``Uncovered`` for a key of the report that docs/report.md does not name."""
    said = set(re.findall(r"\w+", DOCUMENTED.read_text()))
    lines, done, queue = [INTRO.format(number=schema.SCHEMA)], set[type](), [schema.RunReport]
    while queue:
        struct = queue.pop(0)
        if struct in done:
            continue
        done.add(struct)
        rows = []
        hints = typing.get_type_hints(struct)
        for field in msgspec.structs.fields(struct):
            if struct in (schema.RunReport, schema.LoaderReport, schema.Finding) and field.encode_name not in said:
                raise Uncovered(f"docs/report.md says nothing of {field.encode_name} of {struct.__name__}")
            rows.append([code(field.encode_name), _linked(hints[field.name]), _default(field)])
            queue += [t for t in _inside(hints[field.name]) if t not in done]
        lines += [
            f"## {struct.__name__}",
            "",
            inspect.getdoc(struct) or "",
            "",
            table(["key", "type", "default"], rows),
        ]
    return {"reference/report-schema.md": "\n".join(lines)}


def _inside(hint: Any) -> list[type]:
    """The structs in a type."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return [hint]
    return [found for part in typing.get_args(hint) for found in _inside(part)]


def _linked(hint: Any) -> str:
    words = str(hint) if typing.get_args(hint) else getattr(hint, "__name__", str(hint))
    words = re.sub(r"[\w.]*\.(?=[A-Za-z])", "", words)
    names = {t.__name__ for t in _inside(hint)}
    return "".join(f"[{w}](#{w.lower()})" if w in names else w for w in re.split(r"(\w+)", words)).replace("[[", "\\[[")


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default is not msgspec.NODEFAULT:
        return code(repr(field.default)) if not isinstance(field.default, msgspec.Struct) else "all zero"
    if field.default_factory is not msgspec.NODEFAULT:
        made = field.default_factory()
        return code(repr(made)) if not isinstance(made, msgspec.Struct) else "all defaults"
    return "always there"
