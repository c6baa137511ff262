"""Where a dataset has its transforms: in a copy of it another thing can stand there."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

from ..errors import UsageError

HOOKS = ("transform", "transforms", "target_transform")
REMEDY = (
    "Say it yourself: stoker.Staged(dataset, prepare=..., augment=...), where the dataset gives what is read, prepare "
    "makes of it what is the same in every epoch, and augment is random; or give the dataset its random part as an "
    "attribute `transform` that its __getitem__ calls and does not look at"
)


def clone(dataset: Any, path: str = "") -> tuple[Any, list[tuple[str, Any]]]:
    """A shallow copy, of the datasets inside it too; and every one of them, with its path."""
    new = copy.copy(dataset)
    owners = [(path, new)]
    held = getattr(new, "__dict__", {})
    for name in ("dataset", "datasets"):
        inner = held.get(name)
        if name == "dataset" and hasattr(inner, "__getitem__") and not isinstance(inner, (list, tuple, dict)):
            copied, more = clone(inner, f"{path}{name}.")
            put(new, name, copied)
            owners += more
        elif name == "datasets" and isinstance(inner, (list, tuple)):
            pairs = [clone(d, f"{path}{name}[{i}].") for i, d in enumerate(inner)]
            put(new, name, type(inner)([d for d, _ in pairs]))
            owners += [o for _, more in pairs for o in more]
    return new, owners


def hooks(path: str, owner: Any) -> Iterator[tuple[str, Any, str]]:
    """Attributes of a dataset that hold transforms: where, who holds it, its name."""
    for name in HOOKS:
        held = inspect.getattr_static(owner, name, None)
        value = getattr(owner, name, None)
        if value is None or isinstance(held, property) or not (callable(value) or isinstance(value, (list, tuple))):
            continue
        if type(value).__name__ == "StandardTransform":  # torchvision: both of them in one object that is called
            joint = copy.copy(value)
            put(owner, name, joint)
            for part in ("transform", "target_transform"):
                if getattr(joint, part, None) is not None:
                    yield f"{path}{name}.{part}", joint, part
            continue
        yield f"{path}{name}", owner, name


def put(owner: Any, name: str, value: Any) -> None:
    try:
        setattr(owner, name, value)
    except Exception as e:
        raise UsageError(
            f"{type(owner).__name__} cannot be split: its {name} cannot be replaced ({e}). {REMEDY}"
        ) from e
