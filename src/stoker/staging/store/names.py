"""Classes by name: of a script by the name it has when it is imported, so that any run finds them."""

from __future__ import annotations

import os
import sys
from typing import Any

MAIN = ("__main__", "__mp_main__")


def name_of(kind: type) -> str:
    """Where a class is: of a script by the name that it has when it is imported."""
    module = kind.__module__
    return f"{_imported_as(module) if module in MAIN else module}:{kind.__qualname__}"


def _imported_as(main: str) -> str:
    module = sys.modules.get(main)
    spec = getattr(module, "__spec__", None)
    if spec is not None:
        return str(spec.name)
    return os.path.splitext(os.path.basename(getattr(module, "__file__", None) or main))[0]


def class_of(name: str, of: type = tuple) -> Any:
    """A class that is there already; nothing is imported for a name from a file."""
    module, _, path = name.partition(":")
    found: Any = next((sys.modules[m] for m in MAIN if m in sys.modules and _imported_as(m) == module), None)
    found = found or sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    named = isinstance(found, type) and issubclass(found, of) and (of is not tuple or hasattr(found, "_fields"))
    return found if named else None
