"""Finds the transform, decoder and line in a stack, and the transforms and getters of a dataset."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import cast

from . import packages
from .dataset_tree import inner_datasets

DECODERS = re.compile(  # files of installed packages and of the standard library that decode
    r"(PIL|cv2|imageio|tifffile|skimage/io|torchvision/io|decord|av|soundfile|librosa|pydicom|rawpy|torchcodec|"
    r"turbojpeg|simplejpeg|zarr|h5py|numcodecs|pyarrow|gzip|lzma|bz2|zipfile|tarfile|json(?=/decoder))(/|\.py$)"
)
DECODES = re.compile(  # and calls of C libraries, which have no Python frame
    r"\b(imread|imdecode|decode_\w+|decode|decompress|read_image|frombytes|Image\.open|loadtxt|fromstring|json\.loads|"
    r"pickle\.loads?|msgpack\.\w+|orjson\.loads)\("
)


def known_transforms(dataset: object) -> dict[CodeType, str]:
    """Maps code objects to names of transforms: the ``transform``, ``target_transform`` and ``transforms`` of a dataset
    and of nested datasets, and what a Compose-like object or ``nn.Sequential`` among them lists."""
    out: dict[CodeType, str] = {}
    seen: set[int] = set()

    def add(thing: object) -> None:
        if thing is None or id(thing) in seen:
            return
        seen.add(id(thing))
        listed = getattr(thing, "transforms", None)
        if listed is None and type(thing).__name__ == "Sequential":
            listed = list(cast("Iterable[object]", thing))
        if isinstance(listed, (list, tuple)):
            for t in listed:
                add(t)
            return
        inner = getattr(thing, "transform", None)  # torchvision's StandardTransform and its like
        if inner is not None and not hasattr(thing, "__code__"):
            add(inner)
            add(getattr(thing, "target_transform", None))
        name = getattr(thing, "__name__", type(thing).__name__)
        for f in (thing, vars_of(type(thing), "__call__"), vars_of(type(thing), "forward")):
            code = getattr(f, "__code__", None)
            if code is not None and not _is_module_call(code):
                out[code] = name

    with contextlib.suppress(Exception):  # a dataset's attributes may be properties that do anything
        for d in inner_datasets(dataset):
            for attribute in ("transform", "target_transform", "transforms"):
                thing = getattr(d, attribute, None)
                for t in thing if isinstance(thing, (list, tuple)) else [thing]:
                    add(t)
    return out


def vars_of(cls: type, name: str) -> object:
    """The attribute that a class or one of its bases defines, without calling descriptors."""
    return next((vars(c)[name] for c in cls.__mro__ if name in vars(c)), None)


def known_getters(dataset: object) -> set[CodeType]:
    """Code objects of ``__getitem__`` of a dataset and of nested datasets."""
    out: set[CodeType] = set()
    with contextlib.suppress(Exception):  # as above
        for d in inner_datasets(dataset):
            code = getattr(vars_of(type(d), "__getitem__"), "__code__", None)
            if code is not None:
                out.add(code)
    return out


def transform_of(stack: list[CodeType], known: dict[CodeType, str], listed: str = "") -> str:
    """The outermost transform that a stack (code, innermost first) is in, as the user listed it; "" if there is none.
    See ``known_transforms`` and ``listed_in``."""
    for code in reversed(stack):
        if code in known:
            return known[code]
    for at in range(len(stack) - 1, 0, -1):
        if _composes(stack[at]) and not _composes(stack[at - 1]):
            return _class_of(stack, at - 1)
    return listed


def listed_in(leaf: FrameType) -> str:
    """The transform that a Compose-like frame is calling, if it is in C and has no frame; "" for other frames."""
    if not _composes(leaf.f_code):
        return ""
    variables = dict(leaf.f_locals)
    listed = getattr(variables.get("self"), "__dict__", {}).get("transforms")
    for value in variables.values():
        if isinstance(listed, (list, tuple)) and any(value is t for t in listed):
            return str(getattr(value, "__name__", type(value).__name__))
    return ""


def _composes(code: CodeType) -> bool:
    return code.co_name in ("__call__", "forward") and "transforms" in code.co_names


def _class_of(stack: list[CodeType], at: int) -> str:
    """The class that defines the code as a method; skips frames of ``nn.Module.__call__``."""
    while at > 0 and _is_module_call(stack[at]):
        at -= 1
    code = stack[at]
    name: str = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has no qualified names here
    return name.rsplit(".", 1)[0].rsplit(".", 1)[-1].replace("<locals>", code.co_name)


def _is_module_call(code: CodeType) -> bool:
    return code.co_filename == packages.torch_file("nn", "modules", "module.py")


@functools.cache  # called for each frame of a sample
def decoder(path: str) -> str:
    """The decoding library that a file belongs to; "" if none."""
    found = DECODERS.match(packages.installed(path).replace(os.sep, "/"))
    return found[1] if found else ""


@functools.cache  # called for each frame of a sample; os.path.relpath makes a system call for the current folder
def short(path: str) -> str:
    """The path relative to the current folder, if it is inside."""
    with contextlib.suppress(ValueError, OSError):
        relative = os.path.relpath(path)
        if not relative.startswith(".."):
            return relative
    return path
