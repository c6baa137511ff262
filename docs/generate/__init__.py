"""Pages that are made from the source when the site is built, and never stored.

``reference.pages`` makes them all. Each raises ``Uncovered`` where the source has something that a page does not
explain, so that ``make docs`` fails.
"""

import re
from pathlib import Path


class Uncovered(Exception):
    """Something in the source that a generated page does not explain."""


def cell(text: str) -> str:
    """A text for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    """A text in backticks, whatever it holds."""
    fence = "``" if "`" in text else "`"
    pad = " " if "`" in text else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table; cells are escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines) + "\n"


def linked(text: str) -> str:
    """``docs/gpu.md`` in a docstring as a link, for a page in ``reference``."""
    return re.sub(r"`{0,2}docs/([\w/-]+)\.md`{0,2}", r"[\1](../\1.md)", text)


def title(path: str) -> str:
    """The heading of a page that is linked to from ``reference``; of a generated one, its name."""
    if not path.startswith("../"):
        return {"dataloader.md": "stoker.DataLoader"}.get(path, path.removesuffix(".md").capitalize())
    text = (Path(__file__).parents[1] / path.removeprefix("../")).read_text()
    return text.partition("\n")[0].lstrip("# ")
