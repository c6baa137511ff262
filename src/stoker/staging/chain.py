"""Pipelines as lists of transforms: taken apart where that changes nothing, and put together again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Chain:
    """Transforms one after the other, called as a pipeline is: with one value, several, or by keyword.

    A call with one value hands on one value; with several, a tuple of as many; by keyword, a dict.
    """

    def __init__(self, transforms: Sequence[Callable[..., Any]]) -> None:
        self.transforms = list(transforms)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The arguments for whatever comes next."""
        for t in self.transforms:
            out = t(*args, **kwargs)
            args, kwargs = _handed_on(out, args, kwargs)
        return args, kwargs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the whole pipeline returns."""
        args, kwargs = self.call(args, kwargs)
        return outcome(args, kwargs)

    def __repr__(self) -> str:
        return f"Chain({self.transforms})"


def outcome(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a pipeline with these results returns."""
    if kwargs:
        return kwargs
    return args[0] if len(args) == 1 else args


def _handed_on(out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    if kwargs:
        if args or not isinstance(out, dict):
            raise TypeError(f"a transform called by keyword returned {type(out).__name__}, not a dict")
        return (), out
    if len(args) == 1:
        return (out,), {}
    if not isinstance(out, tuple) or len(out) != len(args):
        raise TypeError(f"a transform of {len(args)} values returned {type(out).__name__}, not a tuple of as many")
    return out, {}


def parts_of(pipeline: Any) -> list[Any] | None:
    """The transforms of something that looks like a pipeline; None for anything else."""
    if isinstance(pipeline, Chain):
        return list(pipeline.transforms)
    if isinstance(pipeline, (list, tuple)):
        return list(pipeline)
    if isinstance(pipeline, torch.nn.Sequential):
        hooked = pipeline._forward_hooks or pipeline._forward_pre_hooks
        return None if hooked else list(pipeline.children())
    if "Compose" not in (c.__name__ for c in type(pipeline).__mro__) and type(pipeline).__name__ != "Sequential":
        return None  # OneOf, RandomApply and the like have .transforms, too
    inner = getattr(pipeline, "transforms", None)
    return list(inner) if isinstance(inner, (list, tuple, torch.nn.ModuleList)) and all(map(callable, inner)) else None


def flat(pipeline: Any, same: Callable[[Any, list[Any]], bool], depth: int = 5) -> list[Any]:
    """A pipeline's transforms, those of pipelines inside it included.

    Args:
        pipeline: a callable, or a list of callables.
        same: whether calling the parts one after the other is the same as calling the whole; a part for which it is
            not stays whole.
        depth: pipelines inside pipelines that are taken apart.
    """
    parts = parts_of(pipeline) if depth else None
    if parts is None or not (isinstance(pipeline, (list, tuple, Chain)) or same(pipeline, parts)):
        return [pipeline]
    return [t for part in parts for t in flat(part, same, depth - 1)]


def copied(value: Any) -> Any:
    """A deep copy, or the thing itself where it has none."""
    try:
        return copy.deepcopy(value)
    except Exception:
        return value
