"""What differs between two walks over what making a sample may read (``inputs.Inputs``)."""

from __future__ import annotations

import re
from collections.abc import Collection

from .value_digests import Entry, ValueDigests

DATASET = "dataset[0]"  # path of the dataset; those of global variables begin with dataset[1]
IMPORTED = "imported"


class ComparedInputs(ValueDigests):
    """Entries by path, ``dataset[0].labels``, that can be compared with later ones of the same object."""

    def __init__(self, shared: bool, across_runs: bool, digests: bool = True) -> None:
        super().__init__(shared, across_runs, digests)
        self.entries: dict[str, Entry] = {}

    def changes(self, later: ComparedInputs, opened: dict[str, Entry] | None = None) -> list[str]:
        """Describes the differences from later inputs of the same object. ``opened``: what loading samples creates on
        first use, by path; it may exist or not."""
        opened = opened or {}
        out: list[str] = []
        for path in sorted({**self.entries, **later.entries}, key=lambda p: not p.startswith(DATASET)):
            old, new = self.entries.get(path), later.entries.get(path)
            if old is not None and new is not None and old.digest == new.digest:
                continue
            if new is not None and new.digest == IMPORTED:  # what it holds has entries of its own
                continue
            if _is_opened(path, old, new, opened) or (out and path.startswith("class ")):
                continue
            if old is None and "." in path:  # an attribute that was defined in the class
                old = _of_class(path.rpartition(".")[2], self.entries)
            if old is None or new is None:
                out.append(f"{path} is {new.text}" if new is not None else f"{path} no longer exists")
            elif old.text != new.text:
                out.append(f"{path} was {old.text} and is {new.text}")
            else:
                out.append(path)
        return out

    def why_incomplete(self, opened: dict[str, Entry]) -> str:
        """Names the first object without a complete digest that loading samples did not create; "" if none."""
        return next((why for path, why in self.opaque.items() if not lies_in(path, opened)), "")

    def opened(self, later: ComparedInputs) -> dict[str, Entry]:
        """What differs in later inputs, after a sample was loaded: the later entries by path. Loading other samples
        creates the same in other items of the same container."""
        absent = Entry("not set", None)
        made = {
            path: later.entries.get(path, absent)
            for path in {**self.entries, **later.entries}
            if self.entries.get(path, absent).digest != later.entries.get(path, absent).digest
        }
        return {_of_any_item(path): entry for path, entry in made.items()} | made

    def made_first(self, later: ComparedInputs) -> dict[str, Entry]:
        """Objects that later inputs have where there was nothing, with all that they hold: made on first use."""
        nothing = Entry("None", None)
        made = {
            path
            for path, entry in later.entries.items()
            if isinstance(entry.digest, str) and self.entries.get(path, nothing).text == "None"
        }
        return {path: entry for path, entry in later.entries.items() if lies_in(path, made)}


def _of_class(name: str, entries: dict[str, Entry]) -> Entry | None:
    return next((entry for path, entry in entries.items() if path.endswith(f".{name}']")), None)


def _is_opened(path: str, old: Entry | None, new: Entry | None, opened: dict[str, Entry]) -> bool:
    """Whether loading samples explains a difference: an object created on first use, present or not; or data created by
    it, present or not, but never with other content."""
    known = opened.get(path) or opened.get(_of_any_item(path))
    if known is not None:
        return all(x is None or x.text == "None" or x.digest == known.digest or x.is_opaque for x in (old, new))
    return False


def _of_any_item(path: str) -> str:
    """Generalizes an attribute's path to all items of the dataset's containers."""
    return DATASET + re.sub(r"\[[^]]*]", "[]", path.removeprefix(DATASET)) if path.startswith(DATASET) else path


def lies_in(path: str, paths: Collection[str]) -> bool:
    """Whether a path lies below one of ``paths``."""
    places = f"{path}.", f"{_of_any_item(path)}."
    return any(place.startswith((f"{p}.", f"{p}[")) for p in paths for place in places)
