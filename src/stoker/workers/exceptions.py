"""Errors of a dataset as people want to read them: which sample, which file, which transform, which worker; the user's
own frames first, and the type of the exception kept.

``Caught`` is torch's ``ExceptionWrapper`` with more to say. The first and the last line of its message are torch's, for
scripts and tests look for them; the second is stoker's.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import sys
import traceback
from types import FrameType, TracebackType
from typing import Any

from torch._utils import ExceptionWrapper

from ..core import packages
from ..core.dataset_tree import file_of, listed_file
from ..core.stacks import known_getters, known_transforms, transform_of
from .collate import SlotCollate
from .faults.sample_name import called

MOST_STATE = 1 << 16  # bytes of an exception's attributes that go along with it
PLAIN = (list, tuple)  # what the indices of a batch are
MOST_NAMED = 8  # samples that are counted up
_FETCH = packages.torch_file("utils", "data", "_utils", "fetch.py")
_COLLATES = {SlotCollate.__call__.__code__, SlotCollate.stack.__code__}
_SUBSET = packages.torch_file("utils", "data", "dataset.py")


def explain(error: BaseException, dataset: Any, part: str = "") -> str:
    """Which sample an error came from, its file where the dataset has a list of them, and the transform; empty where
    its traceback says nothing.

    Args:
        error: with its traceback.
        dataset: the loader's.
        part: what to say where no sample can be named, "batch 7" for instance.

    Example:
        >>> class Odd:
        ...     def __getitem__(self, i):
        ...         return 1 // (i % 2)
        >>> try:
        ...     Odd()[4]
        ... except ZeroDivisionError as e:
        ...     explain(e, Odd())
        'stoker: while loading sample 4'
    """
    with contextlib.suppress(Exception):  # a dataset's attributes, and its __repr__, may do anything
        frames = _frames(error.__traceback__)
        ours = next((k for k, f in enumerate(frames) if not _is_engines(f)), len(frames))
        words = _collating(frames[:ours]) or _loading(frames, ours, dataset)
        transform = transform_of([f.f_code for f in frames[::-1]], known_transforms(dataset))
        if transform and not words:
            words = f"while loading {part or 'a sample'}"
        elif part and not words and ours < len(frames):
            words = f"while loading {part}"
        if words:
            return f"stoker: {words}" + (f", in the transform {transform}" if transform else "")
    return ""


def note(error: BaseException, dataset: Any) -> None:
    """Adds what ``explain`` says to an exception, where Python can (3.11)."""
    words = explain(error, dataset)
    if words and hasattr(error, "add_note") and words not in getattr(error, "__notes__", ()):
        error.add_note(words)


def users_part(tb: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of the engine that it begins with. The whole of it where nothing else is left."""
    at = tb
    while at is not None and _is_engines(at.tb_frame):
        at = at.tb_next
    return at or tb


class Caught(ExceptionWrapper):
    """The exception that is being handled, on its way from a worker to the loop.

    What torch's wrapper does, and: engine frames are left out, ``explain`` has the second line, the attributes of the
    exception come along where they can be pickled, and a type that torch would exchange for RuntimeError, because its
    constructor wants other arguments, is raised as a class that is both. A class that cannot be pickled crosses a
    process as its nearest base that can.

    Args:
        where: "in DataLoader worker process 0".
        dataset: the worker's.
        part: see ``explain``.
    """

    exc_type: type[BaseException]
    exc_msg: str
    where: str

    def __init__(self, where: str, dataset: Any = None, part: str = "") -> None:
        kind, error, tb = sys.exc_info()
        assert kind is not None
        assert error is not None
        self.exc_type, self.name, self.where = kind, kind.__name__, where
        self.exc_msg = "".join(traceback.format_exception(kind, error, users_part(tb)))
        words = explain(error, dataset, part)
        self.words = "" if words in self.exc_msg else words  # somebody noted it
        self.state = dict(getattr(error, "__dict__", {}))
        self.state.pop("__notes__", None)  # they are in the text

    def __reduce__(self) -> Any:
        return _put_together, (
            _known(self.exc_type),
            (self.name, self.exc_msg, self.words, self.where),
            _packed(self.state),
        )

    def reraise(self) -> None:
        """Raises it here.

        Raises:
            BaseException: of the type that was caught, or of one that is that type and RuntimeError.
        """
        kind = self.exc_type
        words = f"{self.words}\n" if self.words else ""
        text = f"Caught {self.name} {self.where}.\n{words}Original {self.exc_msg}"
        error = _made(kind, text) or RuntimeError(text)
        with contextlib.suppress(Exception):
            vars(error).update(self.state)
        try:
            raise error
        finally:
            del error  # or this frame, which its traceback holds, holds it


def _put_together(kind: type[BaseException], said: tuple[str, str, str, str], state: bytes) -> Caught:
    caught = Caught.__new__(Caught)
    caught.exc_type, caught.state = kind, {}
    caught.name, caught.exc_msg, caught.words, caught.where = said
    with contextlib.suppress(Exception):
        caught.state = pickle.loads(state)
    return caught


def _known(kind: type[BaseException]) -> type[BaseException]:
    for cls in kind.__mro__:
        with contextlib.suppress(Exception):
            pickle.dumps(cls)
            return cls
    return RuntimeError


def _packed(state: dict[str, Any]) -> bytes:
    out = {}
    for name, value in state.items():
        with contextlib.suppress(Exception):
            if len(pickle.dumps(value)) <= MOST_STATE:
                out[name] = value
    try:
        return pickle.dumps(out)
    except Exception:
        return pickle.dumps({})


class _Words(str):
    """KeyError shows the repr of its argument, and a traceback in quotes cannot be read (CPython issue 2651)."""

    __slots__ = ()

    def __repr__(self) -> str:
        return self


def _made(kind: Any, text: str) -> BaseException | None:
    """An exception of a type that says ``text``, made as its constructor allows."""
    words = _Words(text) if issubclass(kind, KeyError) else text
    with contextlib.suppress(Exception):
        made: BaseException = kind(message=words) if getattr(kind, "message", None) else kind(words)
        if text in str(made):  # else its words are its own
            return made
    with contextlib.suppress(Exception):
        cls = _both(kind)
        error: BaseException = cls.__new__(cls)  # not __init__, which wants what is not known here
        error.args = (text,)
        return error
    return None


@functools.cache
def _both(kind: Any) -> Any:
    """A class that is ``kind`` and RuntimeError, and whose text is its first argument. It goes by torch's name, for
    there are those who compare that."""
    body = {"__str__": lambda self: self.args[0], "__module__": "builtins", "__qualname__": RuntimeError.__qualname__}
    body["__reduce__"] = lambda self: (_made, (kind, self.args[0]))
    bases = (kind,) if issubclass(kind, RuntimeError) else (kind, RuntimeError)
    return type(kind)(RuntimeError.__name__, bases, body)


def _frames(tb: TracebackType | None) -> list[FrameType]:
    out = []
    while tb is not None:
        out.append(tb.tb_frame)
        tb = tb.tb_next
    return out


def _is_engines(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return path.startswith(packages.PACKAGE) or path == _FETCH


def _collating(frames: list[FrameType]) -> str:
    """Whether the engine's frames lead to the collate function, and of which samples."""
    if not any(f.f_code in _COLLATES for f in frames):
        return ""
    indices = next((i for f in frames for i in [f.f_locals.get("indices")] if type(i) in PLAIN), None)
    return f"while collating {_several(indices)}" if indices and indices[0] is not None else "while collating"


def _several(indices: Any) -> str:
    if len(indices) == 1:
        return called(indices[0], "")
    shown = ", ".join(called(i, "").removeprefix("sample ") for i in indices[:MOST_NAMED])
    return f"samples {shown}" + (f" and {len(indices) - MOST_NAMED} more" if len(indices) > MOST_NAMED else "")


def _loading(frames: list[FrameType], ours: int, dataset: Any) -> str:
    """The sample: as the loader calls it, which is what ``dataset[i]`` wants to show the error again; and the file,
    which the loader's dataset knows or one inside it."""
    getters = known_getters(dataset)
    index: Any = None
    file, found = "", False
    for k, f in enumerate(frames):
        name = _variable(f, k < ours, getters)
        if name not in f.f_locals or isinstance(f.f_locals[name], PLAIN):
            continue
        inner = f.f_locals[name]
        if not found or k < ours:  # of the engine's frames the innermost, of datasets inside each other the outermost
            index, found = inner, True
            file = file_of(dataset, index) if k < ours or f.f_locals.get("self") is dataset else ""
        if k >= ours:
            file = listed_file(f.f_locals.get("self"), inner) or file
    if found:
        return f"while loading {called(index, file)}"
    many = next((f.f_locals.get("indices") for f in frames[:ours][::-1] if "indices" in f.f_locals), None)
    if type(many) in PLAIN and many and many[0] is not None and ours < len(frames):
        return f"while loading {_several(many)}"
    return ""


def _variable(f: FrameType, engines: bool, getters: set[Any]) -> str:
    """Which variable of a frame is the index of the sample that is being loaded. In stoker's own frames it is called
    ``index``."""
    if engines:
        return "idx" if f.f_code.co_filename == _FETCH else "index"
    if f.f_code.co_filename == _SUBSET:
        return "idx"
    if f.f_code in getters and f.f_code.co_argcount > 1:
        return f.f_code.co_varnames[1]
    return ""
