"""Reports a dataset's errors with sample, file, transform and worker, only the user's frames, and the original type.

``Caught`` is torch's ``ExceptionWrapper`` with more information. The first and last lines of its message are torch's,
because scripts and tests look for them; the second line is stoker's.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import sys
import traceback
from collections.abc import Callable, Sequence
from types import CodeType, FrameType, TracebackType
from typing import Any

from torch._utils import ExceptionWrapper

from ..core import packages
from ..core.dataset_tree import file_of, listed_file
from ..core.garbage import no_collection
from ..core.stacks import known_getters, known_transforms, transform_of
from ..core.types import Attributes, Batch, Index
from .collate import SlotCollate
from .faults.policy import called
from .protocol import WorkerReply

MAX_ATTRIBUTE = 1 << 16  # bytes; an exception's attributes that pickle to more are not sent
SEQUENCES = (list, tuple)  # types that hold the indices of a batch
MAX_NAMED = 8  # samples listed in a message
_FETCH = packages.torch_file("utils", "data", "_utils", "fetch.py")
_COLLATES = {SlotCollate.__call__.__code__, SlotCollate.stack.__code__}
_SUBSET = packages.torch_file("utils", "data", "dataset.py")


def explain(error: BaseException, dataset: object, part: str = "") -> str:
    """Describes which sample an error came from, its file if the dataset lists files, and the transform; "" if the
    traceback does not show it. ``part`` is named if no sample can be, for instance "batch 7"."""
    with contextlib.suppress(Exception):  # a dataset's attributes, and its __repr__, may do anything
        frames = [f for f, _ in traceback.walk_tb(error.__traceback__)]
        ours = next((k for k, f in enumerate(frames) if not _is_engines(f)), len(frames))
        text = _collating(frames[:ours]) or _loading(frames, ours, dataset)
        transform = transform_of([f.f_code for f in frames[::-1]], known_transforms(dataset))
        if not text and (transform or (part and ours < len(frames))):
            text = f"while loading {part or 'a sample'}"
        if text:
            return f"stoker: {text}" + (f", in the transform {transform}" if transform else "")
    return ""


def note(error: BaseException, dataset: object) -> None:
    """Adds the text of ``explain`` to the exception as a note (Python 3.11)."""
    text = explain(error, dataset)
    if text and hasattr(error, "add_note") and text not in getattr(error, "__notes__", ()):
        error.add_note(text)


def users_part(tb: TracebackType | None) -> TracebackType | None:
    """Strips stoker's and torch's frames from the beginning of a traceback; returns it whole if it has no others."""
    at = tb
    while at is not None and _is_engines(at.tb_frame):
        at = at.tb_next
    return at or tb


class Caught(ExceptionWrapper):
    """Carries the exception that is being handled from a worker to the consumer, as torch's wrapper does. Also leaves
    out the engine's frames, adds the line from ``explain``, and keeps those attributes of the exception that can be
    pickled. If its constructor needs other arguments, torch raises RuntimeError; this class raises a subclass of both
    types. A class that cannot be pickled is sent as its nearest picklable base class. ``where``: for instance "in
    DataLoader worker process 0"; ``part``: see ``explain``."""

    exc_type: type[BaseException]
    exc_msg: str
    where: str

    def __init__(self, where: str, dataset: object = None, part: str = "") -> None:
        kind, error, tb = sys.exc_info()
        assert kind is not None
        assert error is not None
        self.exc_type = kind
        self.name = kind.__name__
        self.where = where
        with no_collection():  # formatting a traceback parses the lines in it
            self.exc_msg = "".join(traceback.format_exception(kind, error, users_part(tb)))
        explanation = explain(error, dataset, part)
        self.explanation = "" if explanation in self.exc_msg else explanation  # it may be a note already
        self.state = dict(getattr(error, "__dict__", {}))
        self.state.pop("__notes__", None)  # they are in the text

    def __reduce__(self) -> tuple[Callable[[Attributes, bytes], Caught], tuple[Attributes, bytes]]:
        fields = {**vars(self), "exc_type": _picklable_base(self.exc_type), "state": {}}
        return _rebuild, (fields, _pickled_attributes(self.state))

    def reraise(self) -> None:
        """Raises it here, as the caught type or as a subclass of that type and RuntimeError."""
        kind = self.exc_type
        explanation = f"{self.explanation}\n" if self.explanation else ""
        text = f"Caught {self.name} {self.where}.\n{explanation}Original {self.exc_msg}"
        error = _made(kind, text) or RuntimeError(text)
        with contextlib.suppress(Exception):
            vars(error).update(self.state)
        try:
            raise error
        finally:
            del error  # else a reference cycle: its traceback holds this frame


def is_error(batch: Batch) -> bool:
    return isinstance(batch.data if type(batch) is WorkerReply else batch, ExceptionWrapper)


def _rebuild(fields: Attributes, state: bytes) -> Caught:
    caught = Caught.__new__(Caught)
    vars(caught).update(fields)
    with contextlib.suppress(Exception):
        caught.state = pickle.loads(state)
    return caught


def _picklable_base(kind: type[BaseException]) -> type[BaseException]:
    for cls in kind.__mro__:
        with contextlib.suppress(Exception):
            pickle.dumps(cls)
            return cls
    return RuntimeError


def _pickled_attributes(state: Attributes) -> bytes:
    out = {}
    for name, value in state.items():
        with contextlib.suppress(Exception):
            if len(pickle.dumps(value)) <= MAX_ATTRIBUTE:
                out[name] = value
    try:
        return pickle.dumps(out)
    except Exception:
        return pickle.dumps({})


class _Unquoted(str):
    """Makes KeyError, which shows its argument's repr, print the traceback readably (CPython issue 2651)."""

    __slots__ = ()

    def __repr__(self) -> str:
        return self


def _made(kind: type, text: str) -> BaseException | None:
    """Makes an exception of this type with the message ``text``, in whatever way its constructor allows."""
    message = _Unquoted(text) if issubclass(kind, KeyError) else text
    with contextlib.suppress(Exception):
        made: BaseException = kind(message=message) if getattr(kind, "message", None) else kind(message)
        if text in str(made):  # else the class replaces the message
            return made
    with contextlib.suppress(Exception):
        cls = _both(kind)
        error: BaseException = cls.__new__(cls)  # skips __init__, whose arguments are unknown
        error.args = (text,)
        return error
    return None


@functools.cache
def _both(kind: type) -> Any:
    """Makes a subclass of ``kind`` and RuntimeError, named as torch's; its message is its first argument."""
    body = {"__str__": lambda self: self.args[0], "__module__": "builtins", "__qualname__": RuntimeError.__qualname__}
    body["__reduce__"] = lambda self: (_made, (kind, self.args[0]))
    bases = (kind,) if issubclass(kind, RuntimeError) else (kind, RuntimeError)
    return type(kind)(RuntimeError.__name__, bases, body)


def _is_engines(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return path.startswith(packages.OWN) or path == _FETCH


def _collating(frames: list[FrameType]) -> str:
    """Says that the engine was collating, and which samples; "" if its frames do not reach the collate function."""
    if not any(f.f_code in _COLLATES for f in frames):
        return ""
    indices = next((i for f in frames for i in [f.f_locals.get("indices")] if type(i) in SEQUENCES), None)
    return f"while collating {_several(indices)}" if indices and indices[0] is not None else "while collating"


def _several(indices: Sequence[Index]) -> str:
    if len(indices) == 1:
        return called(indices[0], "")
    shown = ", ".join(called(i, "").removeprefix("sample ") for i in indices[:MAX_NAMED])
    return f"samples {shown}" + (f" and {len(indices) - MAX_NAMED} more" if len(indices) > MAX_NAMED else "")


def _loading(frames: list[FrameType], ours: int, dataset: object) -> str:
    """Names the sample by the index for which ``dataset[index]`` reproduces the error, and its file, if the loader's
    dataset or a dataset inside it knows the file."""
    getters = known_getters(dataset)
    index: Index = None
    file, found = "", False
    for k, f in enumerate(frames):
        name = _variable(f, k < ours, getters)
        if name not in f.f_locals or isinstance(f.f_locals[name], SEQUENCES):
            continue
        inner = f.f_locals[name]
        if not found or k < ours:  # the innermost engine frame; among nested datasets, the outermost
            index, found = inner, True
            file = file_of(dataset, index) if k < ours or f.f_locals.get("self") is dataset else ""
        if k >= ours:
            file = listed_file(f.f_locals.get("self"), inner) or file
    if found:
        return f"while loading {called(index, file)}"
    many = next((f.f_locals.get("indices") for f in frames[:ours][::-1] if "indices" in f.f_locals), None)
    if type(many) in SEQUENCES and many and many[0] is not None and ours < len(frames):
        return f"while loading {_several(many)}"
    return ""


def _variable(f: FrameType, engines: bool, getters: set[CodeType]) -> str:
    """Returns the name of the frame's variable that holds the index of the sample being loaded; "" if none does."""
    if engines:
        return "idx" if f.f_code.co_filename == _FETCH else "index"
    if f.f_code.co_filename == _SUBSET:
        return "idx"
    if f.f_code in getters and f.f_code.co_argcount > 1:
        return f.f_code.co_varnames[1]
    return ""
