"""What mkdocstrings calls: an ``Example:`` in a docstring is shown as code, and pages that it names are links.

Arguments whose name begins with an underscore are left out.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

PAGE = re.compile(r"`{0,2}docs/([\w/-]+)\.md`{0,2}")  # this file is run by itself: it cannot import generate.linked


class Docstrings(griffe.Extension):
    """The parser of docstrings knows ``Examples:`` only."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for each object once it is complete."""
        if obj.is_function:
            hidden = [p.name for p in obj.parameters if p.name.startswith("_")]
            for name in hidden:
                del obj.parameters[name]
        if obj.docstring is not None:
            text = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
            obj.docstring.value = PAGE.sub(r"[\1](../\1.md)", text)
