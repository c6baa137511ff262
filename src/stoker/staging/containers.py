"""Finds containers of transforms (``Compose`` of any library, ``nn.Sequential``, user-defined), and runs them with
other items.

A container is any callable object with exactly one list or tuple of callables, under any attribute name.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import NamedTuple, TypeAlias, TypeVar

import torch

from .library_objects import Held

Transform: TypeAlias = Callable[..., Held]
Container = TypeVar("Container", bound=Callable[..., object])
_MODULES = "_modules"


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
READ_OF_MODULES = {"forward", *HOOKS}  # attributes that decide what a call of a module runs


def is_changed(module: torch.nn.Module) -> bool:
    """Whether a call runs more than the class's ``forward``, as ``torch.nn.Module._call_impl`` decides it."""
    own, of_all = vars(module), vars(torch.nn.modules.module)
    return "forward" in own or any(own.get(name) or of_all.get(f"_global{name}") for name in HOOKS)


class Items(NamedTuple):
    """The transforms of a container."""

    # attribute that holds them: "transforms", "_modules.transforms" for a ``ModuleList``, "" for the modules of an
    # ``nn.Sequential``
    attribute: str
    items: list[Transform]  # the transforms


def items_of(called: object) -> Items | None:
    """Returns the transforms of a container; None for anything else."""
    held = getattr(called, "__dict__", None)
    if not held or isinstance(called, (type, types.FunctionType, types.ModuleType)):
        return None
    if isinstance(called, torch.nn.Module):
        if is_changed(called):
            return None  # each part would run a hook
        modules = called._modules
        if isinstance(called, torch.nn.Sequential) and modules:
            return Items("", [m for m in modules.values() if m is not None])
        lists = [(name, m) for name, m in modules.items() if isinstance(m, torch.nn.ModuleList)]
        if len(lists) == 1 and len(lists[0][1]):
            return Items(f"{_MODULES}.{lists[0][0]}", list(lists[0][1]))
    if not callable(called):
        return None
    if _are_transforms(held.get("transforms")):
        return Items("transforms", list(held["transforms"]))
    found = [Items(k, list(v)) for k, v in held.items() if _are_transforms(v)]
    return found[0] if len(found) == 1 else None


def _are_transforms(value: object) -> bool:
    return type(value) in (list, tuple) and bool(value) and all(map(callable, value))  # type: ignore[call-overload]


class Loop:
    """A loop over transforms, as a container: ``for t in transforms: x = t(x)``, or ``x, y = t(x, y)``."""

    def __init__(self, transforms: list[Transform]) -> None:
        self.transforms = transforms

    def __call__(self, *args: object) -> object:
        """Returns the result of the last transform."""
        for transform in self.transforms:
            out = transform(*args)
            made = (out,) if len(args) == 1 else tuple(out)
            if len(made) != len(args):
                raise ValueError(f"{len(args)} values to unpack, got {len(made)} from {transform!r}")  # as Python does
            args = made
        return args[0] if len(args) == 1 else args


def with_items(container: Container, attribute: str, items: list[Transform]) -> Container:
    """Shallow copy of a container with other transforms. It shares everything else with the original."""
    new = object.__new__(type(container))
    held = new.__dict__
    held.update(container.__dict__)
    if attribute and not attribute.startswith(_MODULES):
        held[attribute] = type(container.__dict__[attribute])(items)
        return new
    if attribute:
        modules: Held = items
        held[_MODULES] = {**held[_MODULES], attribute.removeprefix(f"{_MODULES}."): torch.nn.ModuleList(modules)}
    else:
        held[_MODULES] = {str(k): m for k, m in enumerate(items)}
    return new


def run_with_items(
    container: Transform, attribute: str, items: list[Transform], *args: object, **kwargs: object
) -> Held:
    """Calls a container with other transforms. Attributes that the call sets end up on the container itself."""
    part = with_items(container, attribute, items)
    out = part(*args, **kwargs)
    own = container.__dict__
    replaced = _MODULES if not attribute else attribute.partition(".")[0]
    for name, value in part.__dict__.items():
        if name != replaced and (name not in own or own[name] is not value):
            own[name] = value
    return out
