"""The files from which samples are read, with their stamps: a cached sample is valid only while none is written.

Which files these are::

    named      each string in the dataset that names a file or folder, also relative to a folder that it names
    opened     folders in which a trial's samples opened something, even natively (inotify(7), ``FolderWatch``), or
               asked for a file, even in vain (``isolate.places``)
    beside     if samples looked in folders that differ in part of their path, all folders that differ from them there
    listed     files in these folders and in those of named files, if their kind is one that samples read: that of
               a file which the trial opened or asked for there, or one that the code mentions. All files if the code
               lists folders
    trees      folders that were named, with everything below them

A kind is a suffix, with one more dot for a hidden file. In folders that everybody writes to (``/tmp``, the home folder)
a suffix says nothing: there a kind is a name with 0 in place of each number, behind a slash.

A stamp consists of the times of the last write and the last change in ns (the latter cannot be forged), the size and
the inode. Hidden files of which samples opened none in the folder, Python's own, and files that readers write to (locks
of LMDB and SQLite) do not count. Nor do checkpoints or logs that the script writes beside its data.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import stat
import struct
import sys
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch

from ..core.marked_code import original
from ..core.object_tree import TABLES, attributes
from ..core.shared import SharedList
from .isolate import EVERYTHING
from .users_code import codes_of, is_library_class

SUFFIX_BYTES = 12
DEPTH = 8  # nesting depth of objects searched for file names
MOST_FILES = 200_000  # whose stamps are compared, at most
MOST_FOLDERS = 4_000  # below a named one that are listed, or watched in a trial, at most
MOST_ABSENT = 200  # named files and folders that do not exist, and may begin to
MOST_IN_ALL = 64_000  # below named ones
MOST_COMPARED = 64  # folders of a trial that are compared with each other, at most
MOST_SEARCHED = 16  # named folders in which other strings are looked up, at most
TRIES = 10_000  # names looked up in a folder without success
TRIES_PER_HIT = 100  # additional tries for each name that is found
NO_PATHS = (bool, int, float, complex, type(None), type, torch.Tensor)
IN_ACCESS, IN_OPEN, IN_NONBLOCK = 0x1, 0x20, 0o4000
NOT_DATA = (".pyc", ".so", "-shm", "lock.mdb", "-journal")
OF_DBM = (".dat", ".dir", ".db", ".pag")
SYSTEM = ("/proc/", "/sys/", "/dev/", "/etc/")
GENERAL = ("/", "/tmp", "/home", "/root", "/proc", "/dev", "/dev/shm")
LISTS = frozenset({"listdir", "scandir", "walk", "fwalk", "glob", "iglob", "rglob", "iterdir", "ImageFolder"})
ALL = "/*"  # among the kinds of a folder: everything in it
ANY = "*"  # begins a part of a path that differs between samples
Stamp = tuple[int, int, int, int] | None


class Kinds(NamedTuple):
    """Which files in a folder count."""

    is_all: bool  # all that are not hidden
    kinds: frozenset[str]

    def joined(self, other: Kinds) -> Kinds:
        return Kinds(self.is_all or other.is_all, self.kinds | other.kinds)

    def has(self, name: str) -> bool:
        if self.is_all and not name.startswith("."):
            return True
        return _kind_of_name(name) in self.kinds or _numbered(name) in self.kinds


def _kind_of_name(name: str) -> str:
    return "." * name.startswith(".") + os.path.splitext(name)[1]


def _numbered(name: str) -> str:
    return "/" + re.sub(r"\d+", "0", name)


def with_places(
    folders: Mapping[str, Collection[str]], places: Mapping[str, Collection[str]]
) -> dict[str, Collection[str]]:
    """Adds folders in which samples looked, with the names that they looked for, and patterns of folders like these. A
    part of a pattern that differs is ``ANY``, and then the part with 0 in place of numbers, if that is alike."""
    out: dict[str, set[str]] = {folder: set(kinds) for folder, kinds in folders.items()}
    general = {*_general(), os.getcwd()}
    for folder, names in places.items():
        kinds = out.setdefault(folder, set())
        files = [name for name in names if name == EVERYTHING or not os.path.isdir(os.path.join(folder, name))]
        kinds |= {ALL for name in files if name == EVERYTHING}
        kinds |= {(_numbered if folder in general else _kind_of_name)(name) for name in files if name != EVERYTHING}
    looked = [folder for folder in places if out[folder]]
    for pattern, alike in _patterns(looked[:MOST_COMPARED], general).items():
        out.setdefault(pattern, set()).update(*(out[folder] for folder in alike))
    return {folder: kinds for folder, kinds in out.items() if kinds}


def _patterns(folders: Collection[str], general: Collection[str]) -> dict[str, set[str]]:
    """Patterns of folders that differ in as few parts of their paths as possible, with these folders."""
    parts = {folder: folder.split("/") for folder in folders}
    out: dict[str, set[str]] = {}
    for a, own in parts.items():
        others = {
            b: [x != y for x, y in zip(own, there, strict=True)]
            for b, there in parts.items()
            if b != a and len(there) == len(own)
        }
        fewest = min(map(sum, others.values()), default=0)
        for b, differs in others.items():
            if sum(differs) > fewest:
                continue
            at = differs.index(True)
            is_numbered = _numbered(own[at]) == _numbered(parts[b][at])
            if at > 1 and (is_numbered or "/".join(own[:at]) not in general):
                wild = [
                    x if x == y else ANY + (_numbered(x)[1:] if _numbered(x) == _numbered(y) else "")
                    for x, y in zip(own, parts[b], strict=True)
                ]
                out.setdefault("/".join(wild), set()).update((a, b))
    return out


def matching(pattern: str) -> list[str]:
    """Folders that match a pattern of ``with_places``."""
    found = [""]
    for part in pattern.split("/")[1:]:
        if not part.startswith(ANY):
            found = [f"{folder}/{part}" for folder in found]
            continue
        wanted = part[len(ANY) :]
        beside: list[str] = []
        for folder in found:
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    is_like = _numbered(entry.name)[1:] == wanted if wanted else not entry.name.startswith(".")
                    if is_like and len(beside) < MOST_FOLDERS and entry.is_dir():
                        beside.append(entry.path)
        found = beside
    return found


class SourceFiles:
    """Files with their stamps. ``folders``: in which a trial opened files, with their suffixes; None: without a trial,
    only files that the dataset names count. ``files``: opened by the trial. ``functions``: that run."""

    def __init__(
        self,
        dataset: object,
        folders: Mapping[str, Collection[str]] | None = None,
        files: Iterable[str] = (),
        texts: Iterable[str] = (),
        functions: Iterable[types.FunctionType] = (),
    ) -> None:
        named, named_folders, absent = _named(dataset, (*texts, *_paths_in_code(functions)))
        self._files = [*named, *files]
        self._folders: dict[str, Kinds] = {}
        self._beside: dict[str, Kinds] = {}  # by pattern
        general = _general()
        if folders is not None:
            mentioned = _suffixes_mentioned(functions, texts)
            parents = sorted({os.path.dirname(os.path.abspath(path)) for path in self._files})
            for folder in dict.fromkeys((*parents, *folders)):
                opened = frozenset(folders.get(folder, ()))
                is_all = (mentioned is None and folder not in general) or ALL in opened
                kinds = Kinds(is_all, opened if folder in general else opened | (mentioned or set()))
                (self._beside if f"/{ANY}" in folder else self._folders)[folder] = kinds
        self._files += absent[:MOST_ABSENT]
        self._trees = _not_too_general(named_folders)
        self.why_incomplete = ""  # why there are more files than these
        self.stamps = self.now()  # of each file when this was made

    def now(self) -> dict[str, Stamp]:
        """Current stamps of all files."""
        out: dict[str, Stamp] = {path: stamp_of(path) for path in self._files}
        if "sqlite3" in sys.modules:
            out |= _write_ahead_logs(self._files)
        whole: dict[str, None] = {}
        for path in self._trees:
            if path in whole:
                continue
            found, is_complete = folders_below(path)
            whole |= dict.fromkeys(found)
            if not is_complete:
                self.why_incomplete = f"{path} has too many folders for all of its files to be compared"
            if len(whole) > MOST_IN_ALL:
                self.why_incomplete = f"there are more than {MOST_IN_ALL:,} folders with files to be compared"
                break
        listed = dict(self._folders)
        for pattern, kinds in self._beside.items():
            beside = matching(pattern)
            if len(beside) >= MOST_FOLDERS:
                self.why_incomplete = f"{pattern} are too many folders for all of their files to be compared"
            for folder in beside:
                listed[folder] = listed.get(folder, kinds).joined(kinds)
        for folder in whole:
            kinds = listed.pop(folder, Kinds(True, frozenset()))
            _list(folder, out, kinds._replace(is_all=True))
        for folder, kinds in listed.items():
            _list(folder, out, kinds)
        if len(out) >= MOST_FILES:
            self.why_incomplete = f"there are more than {MOST_FILES:,} files to be compared"
        return out

    def changes(self) -> list[str]:
        """Files written, created or removed since the stamps were taken."""
        now = self.now()
        if now == self.stamps:
            return []
        return [path for path, stamp in {**self.stamps, **now}.items() if now.get(path) != self.stamps.get(path)]

    def unwatched(self, places: Mapping[str, Collection[str]]) -> str:
        """A path among these (see ``isolate.places``) that is not compared; "" if all are."""
        trees = {os.path.abspath(tree) for tree in self._trees}
        for folder, names in places.items():
            kinds = self._folders.get(folder, Kinds(False, frozenset()))
            for pattern, alike in self._beside.items():
                kinds = kinds.joined(alike) if folder in matching(pattern) else kinds
            if any(folder == tree or folder.startswith(f"{tree}/") for tree in trees):
                continue
            for name in names:
                path = os.path.join(folder, name)
                is_known = path in self.stamps or os.path.relpath(path) in self.stamps or kinds.has(name)
                if not (kinds.is_all if name == EVERYTHING else is_known or os.path.isdir(path)):
                    return path
        return ""


def _named(dataset: object, more: Iterable[str]) -> tuple[list[str], list[str], list[str]]:
    """Files, folders, and absolute paths of nothing, named by a dataset's strings and by ``more``."""
    by_kind: dict[str, list[str]] = {"file": [], "folder": [], "": []}
    for text in dict.fromkeys((*more, *texts_in(dataset))):
        by_kind[_kind(text)].append(text)
    files, folders = by_kind["file"], by_kind["folder"]
    relative = [text for text in by_kind[""] if not os.path.isabs(text)]
    files += _with_suffix(by_kind[""])
    for folder in folders[:MOST_SEARCHED]:
        tries = TRIES
        for text in relative:
            if tries <= 0:  # strings that are not file names, say a million captions, must not be tried everywhere
                break
            path = os.path.join(folder, text)
            found = _kind(path)
            tries += TRIES_PER_HIT if found else -1
            if found == "file":
                files.append(path)
    return files, folders, [text for text in by_kind[""] if os.path.isabs(text) and not _belongs_to_system(text)]


def _with_suffix(texts: Iterable[str]) -> Iterator[str]:
    """Files whose path is one of these and a suffix, which libraries add: ``shelve.open("data/names")`` reads
    data/names.dat and data/names.dir. In the working folder, only Python's own."""
    by_folder: dict[str, set[str]] = {}
    for text in texts:
        folder, name = os.path.split(text)
        if name and (folder or "dbm" in sys.modules) and not _belongs_to_system(text):
            by_folder.setdefault(folder, set()).add(name)
    for folder, names in by_folder.items():
        with contextlib.suppress(OSError, ValueError), os.scandir(folder or ".") as entries:
            for entry in entries:
                stem, suffix = os.path.splitext(entry.name)
                if suffix and stem in names and (folder or suffix in OF_DBM):
                    yield os.path.join(folder, entry.name)


def texts_in(dataset: object) -> Iterator[str]:
    """Yields strings and paths that a dataset holds or that the code of its classes mentions."""
    seen: set[int] = set()
    waiting: list[tuple[object, int]] = [(dataset, DEPTH)]
    classes: dict[type, None] = {}
    count = 0
    while waiting and count < MOST_FILES:
        x, depth = waiting.pop()
        if isinstance(x, (str, bytes, os.PathLike)):
            count += 1
            text = x if isinstance(x, str) else os.fsdecode(x)
            if 0 < len(text) <= 4096 and "\0" not in text and "\n" not in text:
                yield text
        elif depth and not isinstance(x, NO_PATHS) and id(x) not in seen:
            seen.add(id(x))
            waiting += [(v, depth - 1) for v in _items(x)]
            classes.update(dict.fromkeys(type(x).__mro__ if hasattr(x, "__dict__") else ()))
    for cls in classes:
        yield from _texts_in_class(cls)


def _texts_in_class(cls: type) -> Iterator[str]:
    if is_library_class(cls):
        return
    for member in list(vars(cls).values()):
        fn = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
        constants = fn.__code__.co_consts if isinstance(fn, types.FunctionType) else (member,)
        for constant in constants:
            if isinstance(constant, str) and 0 < len(constant) < 256 and not set(constant) & set("\0\n "):
                yield constant


def _suffixes_mentioned(functions: Iterable[types.FunctionType], texts: Iterable[str]) -> set[str] | None:
    """Suffixes in strings of the code and short ones of the dataset, and "". None: the code lists folders."""
    out = {""}
    for fn in functions:
        for code in codes_of(original(fn.__code__)):
            if not LISTS.isdisjoint(code.co_names):
                return None
            for text in (*code.co_consts, *(fn.__defaults__ or ())):
                for part in text if isinstance(text, (tuple, frozenset)) else (text,):
                    if isinstance(part, str) and len(part) < 256:
                        out |= _suffixes_of(part)
    for text in texts:
        if len(text) < SUFFIX_BYTES:
            out |= _suffixes_of(text)
    return out


def _paths_in_code(functions: Iterable[types.FunctionType]) -> Iterator[str]:
    """Yields strings in the code that name a file, or may begin the name of one; or a folder, often by chance, if the
    code lists folders."""
    for fn in functions:
        for code in codes_of(original(fn.__code__)):
            lists = not LISTS.isdisjoint(code.co_names)
            for text in (*code.co_consts, *(fn.__defaults__ or ())):
                if isinstance(text, str) and 0 < len(text) < 256 and "\0" not in text:
                    kind = _kind(text)
                    if kind == "file" or (lists if kind else os.path.dirname(text) or "dbm" in sys.modules):
                        yield text


def _suffixes_of(text: str) -> set[str]:
    """ ".png" for "{}_mask.png", ".png" and "png"."""
    last = text.rpartition(".")[2]
    return {f".{last}"} if last.isalnum() and len(last) < SUFFIX_BYTES else set()


def _items(x: object) -> Iterable[object]:
    if isinstance(x, Mapping):
        with contextlib.suppress(Exception):
            return [*x.values(), *x.keys()]
        return ()
    if isinstance(x, (list, tuple, set, frozenset, deque, SharedList)):
        return x
    if isinstance(x, np.ndarray):
        return x.reshape(-1).tolist() if x.dtype.kind in "OUS" else ()
    if type(x).__module__.partition(".")[0] in TABLES and hasattr(x, "to_numpy"):
        with contextlib.suppress(Exception):
            return (x.to_numpy(),)
        return ()
    return attributes(x).values()


def _kind(path: str) -> str:
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return ""
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else ""


def stamp_of(path: str) -> Stamp:
    """Modification and change times, size and inode of a file; None if it does not exist."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


def _write_ahead_logs(files: Iterable[str]) -> dict[str, Stamp]:
    """Stamps of the logs beside SQLite databases, to which a transaction is written first. Readers create empty ones.
    Source: https://www.sqlite.org/wal.html"""
    logs = {f"{path}-wal": stamp_of(f"{path}-wal") for path in files}
    return {path: stamp for path, stamp in logs.items() if stamp is not None and stamp[2]}


def _general() -> set[str]:
    """Folders that everybody writes to."""
    return {os.path.expanduser("~"), os.environ.get("TMPDIR", "/tmp"), *GENERAL}


def _not_too_general(folders: Iterable[str]) -> list[str]:
    """Drops folders that hold more than data."""
    general = {*_general(), os.getcwd()}
    real = dict.fromkeys(os.path.abspath(f) for f in folders)
    return [f for f in real if f not in general and not _belongs_to_system(f)]


def _belongs_to_system(path: str) -> bool:
    """Whether a path belongs to the system, such as a terminal, whose times change with each line."""
    return path.startswith(SYSTEM) and not path.startswith("/dev/shm/")


def folders_below(path: str) -> tuple[list[str], bool]:
    """A folder and those below it, the nearest first; and whether these are all."""
    out: list[str] = []
    waiting = deque([path])
    linked = {os.path.realpath(path)}
    while waiting and len(out) < MOST_FOLDERS:
        folder = waiting.popleft()
        out.append(folder)
        try:
            with os.scandir(folder) as found:
                inside = [e for e in found if not e.name.startswith((".", "__pycache__")) and e.is_dir()]
        except OSError:
            continue
        for entry in inside:
            if entry.is_symlink():  # perhaps to a folder above
                real = os.path.realpath(entry.path)
                if real in linked:
                    continue
                linked.add(real)
            waiting.append(entry.path)
    return out, not waiting


def _list(folder: str, out: dict[str, Stamp], kinds: Kinds) -> None:
    """Adds the files directly in a folder that count."""
    try:
        with os.scandir(folder) as found:
            for entry in found:
                name = entry.name
                if len(out) >= MOST_FILES or name.endswith(NOT_DATA) or not kinds.has(name):
                    continue
                path = entry.path
                try:  # not suppress(): there may be 200,000 entries
                    dangles = entry.is_symlink() and not os.path.exists(path)
                    status = entry.stat(follow_symlinks=not dangles)
                except OSError:
                    continue
                if dangles or stat.S_ISREG(status.st_mode):
                    out[path] = status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino
                elif kinds.is_all:  # code that lists the folder sees a folder in it
                    out[path] = 0, 0, 0, status.st_ino
    except OSError:
        pass


class FolderWatch:
    """Records the folders in which files are opened while it lasts, also by native code; on Linux only. In the working
    folder, where other processes open files too, only suffixes that the code mentions count."""

    def __init__(
        self, dataset: object, texts: Iterable[str] = (), functions: Iterable[types.FunctionType] = ()
    ) -> None:
        self._mentioned = _suffixes_mentioned(functions, texts)
        self._names: dict[int, str] = {}
        self._fd = -1
        files, folders, _ = _named(dataset, texts)
        parents = {os.path.dirname(os.path.abspath(path)) for path in files}
        near = {os.path.dirname(path) for path in parents}  # root/labels of root/images/0.jpg
        here = self._here = os.getcwd()
        candidates: dict[str, None] = {here: None}
        for root in _not_too_general({*folders, *parents, *near}):
            if len(candidates) < MOST_FOLDERS:
                candidates |= dict.fromkeys(folders_below(root)[0])
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            self._fd = libc.inotify_init1(IN_NONBLOCK)
            for folder in list(candidates)[:MOST_FOLDERS]:
                number = libc.inotify_add_watch(self._fd, os.fsencode(folder), IN_ACCESS | IN_OPEN)
                if number >= 0:
                    self._names[number] = folder
        except (OSError, AttributeError):
            self._fd = -1

    def folders(self) -> dict[str, set[str]]:
        """Folders in which something was opened so far, with the suffixes of the opened files. If several lie side by
        side, one per sample, their siblings are included."""
        found: dict[str, set[str]] = {}
        for number, name in self._events():
            folder, suffix = self._names.get(number), os.path.splitext(name)[1]
            is_known = self._mentioned is None or (suffix and suffix in self._mentioned)
            if folder is not None and (folder != self._here or is_known):
                found.setdefault(folder, set()).add(suffix)
        parents = [os.path.dirname(path) for path in found]
        beside = {path for path in parents if parents.count(path) > 1}
        for path in self._names.values():
            if os.path.dirname(path) in beside and path not in found:
                others = (suffixes for p, suffixes in found.items() if os.path.dirname(p) == os.path.dirname(path))
                found[path] = set().union(*others)
        return found

    def _events(self) -> Iterator[tuple[int, str]]:
        """Yields the watch number and file name of each event."""
        data = b""
        while self._fd >= 0 and select.select([self._fd], [], [], 0)[0]:
            try:
                part = os.read(self._fd, 1 << 16)
            except OSError:
                break
            if not part:
                break
            data += part
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        at = 0
        while at + 16 <= len(data):
            number, _, _, size = struct.unpack_from("iIII", data, at)
            yield number, os.fsdecode(data[at + 16 : at + 16 + size].rstrip(b"\0"))
            at += 16 + size
