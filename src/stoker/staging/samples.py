"""Samples that a trial makes under random states of its choice."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import random
import re
import time
import types
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..core.compare import equal_bits
from ..core.dataset_tree import inner_datasets, without_subsets
from ..core.errors import one_line
from ..core.fingerprint import Fingerprint, PartsByPath
from ..core.marked_code import original
from ..core.object_tree import PLAIN
from ..core.random_state import RandomState
from ..core.types import Attributes, Index, MapDataset, Sample
from ..sampling.generators import find_generators, seed_generator
from . import own_caches
from .aliases import OtherNames, share_memory
from .callee import Call, call_of
from .executed_code import Executed, in_worker, written_by, written_through_locals
from .inputs import Inputs, functions_of
from .isolate import output_size, tell_sample_time
from .plan import globals_now
from .store.encode import CacheError
from .switches import names_stored
from .users_code import attributes_read, has_branches, is_users_module, names_in
from .value_digests import Entry, readable

# Names that differ between processes or threads.
OF_PROCESS = frozenset(
    {"getpid", "getppid", "current_process", "signal", "local", "get_ident", "get_native_id", "current_thread"}
    | {"_exit", "abort", "kill", "raise_signal"}  # a worker that ends is replaced
)
SAMPLES = 3  # samples whose parts are compared with the whole
ATTEMPTS = 12  # samples tried until one can be loaded
# Names of what prints, logs or writes; the second set has some more, which mostly mean something else: ``np.log``.
PRINTS = frozenset({"print", "logging", "logger", "debug", "warning", "write", "writelines"})
OUTPUT = PRINTS | {"log", "info", "warn", "dump", "save"}
# Names of drawing functions that do not contain "rand".
DRAWS = frozenset(("choice", "choices", "sample", "shuffle", "permutation", "uniform", "uniform_", "normal", "normal_"))
DRAWS |= frozenset(("bernoulli", "binomial", "dropout", "gauss", "multinomial", "poisson"))
# Libraries that draw from generators whose states are known.
KNOWN_GENERATORS = frozenset({"random", "numpy", "torch", "torchvision", "torchaudio", "scipy", "sklearn", "skimage"})
KNOWN_GENERATORS |= frozenset({"albumentations", "kornia", "monai", "timm", "secrets"})
# What a ``__getitems__`` may name that makes one sample after the other.
BY_SAMPLE = frozenset({"__getitem__", "range", "list", "tuple", "map", "append", "int"})
MOST_SMALL = 256  # bytes
SEED = 1000  # for samples made as a whole


def may_draw(names: Iterable[str]) -> bool:
    """Whether code that mentions these names may draw random numbers."""
    return any("rand" in name.lower() or name in DRAWS for name in names)


def _foreign_generator(fn: types.FunctionType) -> str:
    """A function that may draw from a library's own generator (``cv2.randn``), whose state is in each process; "" if
    the code names none."""
    for root, *names in sorted(attributes_read(original(fn.__code__))):
        owner = fn.__globals__.get(root)
        top = owner.__name__.partition(".")[0] if isinstance(owner, types.ModuleType) else ""
        if top and top not in KNOWN_GENERATORS and not is_users_module(owner) and may_draw(names):
            return ".".join((root, *names))
    return ""


class Whole(NamedTuple):
    """A sample as made by the dataset itself."""

    value: Sample  # the sample
    states: object  # of all generators after that


class MadeFrom(NamedTuple):
    """What objects made on first use may be made from, as in ``Executed``."""

    names: set[str]
    variables: set[tuple[str, str]]
    looks_up_names: bool


def _roots(paths: Collection[str]) -> list[str]:
    """Paths that do not lie inside others of them."""
    return [p for p in paths if not any(p[: step.start()] in paths for step in re.finditer(r"[.[]", p))]


def _names(paths: Iterable[str]) -> set[str]:
    """Attributes and variables with some paths."""
    return {found[0] for p in paths if (found := re.match(r"\w+", p.rpartition(".")[2]))}


def _stored_by(functions: Iterable[types.FunctionType]) -> set[str]:
    """Attributes that functions set; a ``cached_property`` sets the one with its own name."""
    return {name for fn in functions for name in (fn.__name__, *names_stored(original(fn.__code__)))}


def of_dataset(change: str) -> str:
    """A change that ``Inputs`` describes, as ``Fingerprint`` would: "dataset.n was 1 and is 2"."""
    return "dataset" + change.removeprefix("dataset[0]") if change.startswith("dataset[0]") else change


def positions(n: int) -> list[int]:
    """Indices at which a trial looks into a dataset of ``n`` samples."""
    spread = [n * k // (ATTEMPTS + 1) for k in range(1, ATTEMPTS)]
    wanted = [0, n - 1, n // 2, *spread, *range(min(n, ATTEMPTS))]
    return [i for i in dict.fromkeys(wanted) if 0 <= i < n]


def occupy(seed: int) -> list[object]:
    """Takes some memory of each size of small objects. As long as it is held, new objects lie elsewhere. So a sample
    differs if it depends on their addresses: ``hash(object())``, ``id(x)``."""
    count = random.Random(seed).randrange
    sizes = [size for size in range(0, MOST_SMALL, 16) for _ in range(count(40))]
    return [*(object() for _ in range(count(64, 600))), *map(bytes, sizes)]


class TrialSamples:
    """A few samples of a dataset. ``indices``: which, if not chosen here. ``sampler``: has others if these fail."""

    def __init__(self, dataset: MapDataset, indices: Sequence[Index] = (), sampler: Iterable[Index] = ()) -> None:
        self.dataset = dataset
        self.generators = find_generators(dataset)  # all generators reachable from it, each with a path
        self.by_batch = False  # the dataset takes no numbers, but lists of indices, or windows of a picture
        self._sampler = sampler
        self.loaded: list[Index] = []  # indices of loaded samples
        self.changes: list[str] = []  # attributes of the dataset that each sample changes, every time or once
        # the same, plus values set where there was None, such as a list in which the dataset caches samples; and data
        # changed by the first sample
        self.filled: list[str] = []
        self.opened: PartsByPath = {}  # attributes created by loading the first sample. See ``Fingerprint.opened``.
        self.made: dict[str, Entry] = {}  # what loading the first sample creates. See ``Inputs.opened``.
        self.of_thread: set[str] = set()  # paths among these of ``threading.local`` objects with plain data
        self.opens: list[str] = []  # paths among these of files, databases, and objects with unreadable state
        self.own_caches: list[own_caches.Path] = []  # attributes in which the dataset caches what it loaded
        self.varies = False  # a part without draws gave other bits on a repeat: something unseen keeps a state
        self.draws = False  # loading a sample advanced a generator
        self.only_together = ""  # why nothing that single samples show holds for batches
        self.sample_s = float("inf")  # seconds per sample, the minimum
        self.collate_s = float("inf")  # collate time per sample; infinite if unknown
        self.variables: set[tuple[str, str]] = set()  # module and name of known global variables that its code reads
        self._first = Executed(dataset)  # the code that ran for the first sample, and may have made something
        self._seed = SEED
        self._occupied: list[object] = []  # see ``occupy``
        self._wholes: dict[str, Whole] = {}  # by the index's repr
        self.fresh: list[Index] = list(indices or positions(len(dataset)))  # indices of samples not loaded yet

    # -- random states

    def seed_anew(self) -> RandomState:
        """Sets random states that were not used before."""
        self._seed += 1
        return self.seed(self._seed)

    def seed(self, seed: int) -> RandomState:
        """Sets the random states for a seed, as in a process that has loaded nothing."""
        self.forget_results()
        self._occupied = occupy(seed)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        torch.default_generator.manual_seed(seed)
        for k, (_, generator) in enumerate(self.generators):  # in place, so that sharing objects keep sharing one
            seed_generator(generator, seed + k + 1)
        return self.states()

    def forget_results(self) -> None:
        """Clears ``functools.lru_cache`` functions, as in a new worker. Otherwise one that draws random numbers in its
        first call would appear not to draw."""
        for function in self.caches:
            function.cache_clear()

    @functools.cached_property
    def caches(self) -> list[functools._lru_cache_wrapper[object]]:
        """The functions with ``functools.lru_cache`` that may run."""
        return Inputs(self.dataset, digests=False).caches

    def seed_as_wholes(self) -> RandomState:
        """Sets the random states under which samples are made as a whole."""
        return self.seed(SEED)

    def states(self) -> RandomState:
        """Returns the current random states."""
        return RandomState(self.generators)

    # -- samples

    def load_first(self) -> None:
        """Loads two samples. What the first changes counts as opened; what the second changes, every sample changes.
        Raises CacheError if no sample can be loaded."""
        unopened, empty = Fingerprint(self.dataset), own_caches.empty_ones(self.dataset)
        inputs = Inputs(self.dataset)
        indices = self.fresh
        self.fresh = list(indices)
        try:
            self._load_observed()
        except CacheError as e:
            self.by_batch = True
            for others in ([list(pair) for pair in itertools.pairwise(indices)], self._of_sampler()):
                self.fresh = others
                with contextlib.suppress(CacheError):
                    self._load_observed()
                    break
            else:
                raise e
        tell_sample_time(self.sample_s)
        self.generators = find_generators(self.dataset)  # some are created on first use
        before = Fingerprint(self.dataset)
        self.opened = unopened.opened(before)
        first_changes = unopened.changed_since(before)
        later = Inputs(self.dataset)
        self.made = inputs.opened(later)
        self.opens, self.of_thread = sorted(later.handles & self.made.keys()), later.of_thread
        try:
            self._load_fresh()
        except CacheError:
            self.load(self.loaded[0])
        after = Fingerprint(self.dataset)
        self.changes = before.changed_since(after) + self._changed_results()
        self.seed_anew()
        self.make(self.loaded[-1])  # what it keeps of its draws differs now
        again = Inputs(self.dataset)
        changes = map(of_dataset, later.changes(again, self.made | later.made_first(again)))
        self.changes += [change for change in changes if change not in self.changes]
        self.filled = before.added_or_changed_since(after) + (first_changes if unopened.settled(before) else [])
        self._find_own_caches(empty)

    def _changed_results(self) -> list[str]:
        """Functions with ``functools.lru_cache``, if a sample changes when they have cached results."""
        if not self.caches:
            return []
        states = self.seed_as_wholes()
        first = copy.deepcopy(self.make(self.loaded[0]))
        states.restore()
        again = self.make(self.loaded[0])
        if len(self.loaded) > 1:  # a file that all samples need is read once per process
            began = time.perf_counter()
            self.make(self.loaded[-1])
            self.sample_s = time.perf_counter() - began
        return [] if equal_bits(first, again) else [f"dataset.{f.__name__}" for f in self.caches]

    def _of_sampler(self) -> list[Index]:
        """The first indices that the loader's sampler yields, in batches or singly."""
        out: list[Index] = []
        with contextlib.suppress(Exception):
            for found in itertools.islice(self._sampler, ATTEMPTS):
                out += found if isinstance(found, list) else [found]
        return out

    def _find_own_caches(self, were_empty: set[own_caches.Path]) -> None:
        """Records attributes that were empty, if samples have the same bits now that they are filled; empties them."""
        grown = sorted(were_empty - own_caches.empty_ones(self.dataset))
        if not grown or self.by_batch:
            return
        # A cache whose items are modified later holds more than loaded data.
        changed = set().union(*map(written_through_locals, functions_of(self.dataset)))
        if any(path[-1] in changed for path in grown):
            return
        sample_s = self.sample_s
        with own_caches.watched(self.dataset, grown) as watched:
            for i in self.loaded:
                first, again = self._wholes[repr(i)], self.load(i)
                if not equal_bits(first.value, again.value) or first.states != again.states:
                    return
            if not all(x.was_read and not x.was_written for x in watched):
                return
        for path in grown:
            own_caches.replace(self.dataset, path)
        self.own_caches, self.sample_s = grown, sample_s
        names = tuple(f"dataset.{'.'.join(path)}{end}" for path in grown for end in (" ", "["))
        self.changes, self.filled = (
            [change for change in changes if not f"{change} ".startswith(names)]
            for changes in (self.changes, self.filled)
        )
        places = tuple(f"dataset[0].{'.'.join(path)}[" for path in grown)
        self.made = {path: entry for path, entry in self.made.items() if not f"{path}[".startswith(places)}
        at = tuple(f".{'.'.join(path)}[" for path in grown)
        self.opened = {path: part for path, part in self.opened.items() if not f"{path}[".startswith(at)}

    def some(self) -> list[Index]:
        """Indices of some samples that can be loaded."""
        while len(self.loaded) < SAMPLES and self.fresh:
            try:
                self._load_fresh()
            except CacheError:
                break
        return self.loaded[:SAMPLES]

    def _load_observed(self) -> None:
        """Loads the first sample."""

        def load() -> None:
            with in_worker(None):
                self._load_fresh()

        self._first.run(load)

    def _load_fresh(self) -> None:
        """Loads a sample that was not loaded before."""
        why = "it has no more samples"
        for _ in range(ATTEMPTS):
            if not self.fresh:
                break
            i = self.fresh.pop(0)
            try:
                self._wholes[repr(i)] = self.load(i)
                self.loaded.append(i)
                return
            except Exception as e:
                why = one_line(e)
                if "Permission denied" in why:  # from native code, which raises no audit events
                    why = f"in the trial run, which must not write files, {why}"
        raise CacheError(f"its samples cannot be loaded: {why}")

    def call(self, i: Index) -> Call:
        """The call that makes a sample."""
        return call_of(self.dataset.__getitem__, (i,), {})

    def make(self, i: Index) -> Sample:
        """Makes a sample like a worker's first one, under the current random states."""
        with self.emptied():
            return self.dataset[i]

    def are_views(self) -> bool:
        """Whether samples may be views of memory that the dataset keeps."""
        try:
            return share_memory(self.dataset[self.loaded[0]], self.dataset[self.loaded[0]])
        except Exception:  # the user's
            return True

    def emptied(self) -> contextlib.AbstractContextManager[None]:
        """Inside the ``with``, the dataset's own caches are empty; changes to them are then dropped."""
        return own_caches.emptied(self.dataset, self.own_caches)

    def load(self, i: Index) -> Whole:
        """Makes a sample as a whole."""
        before = self.seed_as_wholes()
        began = time.perf_counter()
        value = self.make(i)
        self.sample_s = min(self.sample_s, time.perf_counter() - began)
        self.draws |= bool(before.moved())
        states = self.states().in_order()
        try:
            return Whole(copy.deepcopy(value), states)  # the next sample may overwrite its memory
        except Exception:
            return Whole(value, states)

    @property
    def assigned(self) -> set[str]:
        """Attributes that loading any sample may assign to, except those that the first one opened."""
        return self._executed.assigned - {path.rpartition(".")[2] for path in self.opened}

    @property
    def written(self) -> set[str]:
        """Attributes and global variables that the user's code may change while loading a sample, except those that the
        first one opened, and the dataset's own caches."""
        found = set(self._executed.written).union(*map(self._other_names.of, self._executed.changed_arguments))
        return self._other_names.more(found) - self._handles - {path[-1] for path in self.own_caches}

    @functools.cached_property
    def _other_names(self) -> OtherNames:
        return OtherNames(self.dataset, [fn.__globals__ for fn in functions_of(self.dataset)])

    @property
    def may_write(self) -> set[str]:
        """``written`` for all functions that may run: those with a name that the code mentions. An upper bound: nothing
        else is written, but some names may belong to another class."""
        return self.written.union(*map(written_by, self._may_run(set(self._executed.user_names))))

    def _may_run(
        self, names: set[str], special: str = "__", without: Collection[types.FunctionType] = ()
    ) -> Iterator[types.FunctionType]:
        """Yields the user's functions whose names are mentioned, in any branch, by code that may run, and those whose
        names begin with ``special``; without ``special``, those that an attribute of such a name holds. Adds the names
        that they mention to ``names``."""
        found = Inputs(self.dataset, digests=False)
        waiting = [fn for fn in found.functions.values() if fn not in without]

        def may_run(fn: types.FunctionType) -> bool:
            if special and fn.__name__.startswith(special):
                return True
            called_as = set() if special else found.called_as.get(id(fn), set())
            return not names.isdisjoint({fn.__name__, *called_as})

        while run := [fn for fn in waiting if may_run(fn)]:
            yield from run
            waiting = [fn for fn in waiting if fn not in run]
            for fn in run:
                names |= names_in(original(fn.__code__))[1]

    def may_read(self, names: Collection[str], without: Collection[types.FunctionType] = ()) -> set[str]:
        """Names that code mentioning ``names`` may read. Includes names in functions that ran for no sample, because a
        ``cached_property`` runs only once. ``without``: functions of which only parts are cached."""
        out = {*names, "__getitems__"}  # which loaders call instead of ``__getitem__``
        for _ in self._may_run(out, special="", without=without):
            pass
        return out

    def made_from(
        self, reads: Collection[str], stored: Collection[str] = (), without: Collection[types.FunctionType] = ()
    ) -> MadeFrom:
        """What those of ``reads`` that the first sample made may be made from: it counts as read too. New workers make
        them again from what the script has set since, which its own process does not see. ``stored``: attributes that
        the reading code assigns to. ``without``: as in ``may_read``.

        If only code that ``reads`` leads to makes them, that is what it names. Otherwise, all that code names."""
        made = _names(_roots({*self.opened, *self.made})) & set(reads)
        if not made:
            return MadeFrom(set(), set(), False)
        names = set(reads)
        makes = list(self._may_run(names, without=without))
        others = [fn for fn in functions_of(self.dataset) if fn not in makes]
        inside, outside = (_stored_by(functions) for functions in (makes, others))
        first = self._first
        if not made <= (inside - outside).union(stored):
            names |= self.may_read(first.names)
        variables = {(module, name) for module, name in first.variables if not names.isdisjoint(name.split("."))}
        return MadeFrom(names, variables, first.looks_up_names)

    @property
    def stored(self) -> set[str]:
        """``written``, plus attributes that library code assigns to."""
        return self.written | (self._executed.stored_in_lasting - self._handles)

    @property
    def _handles(self) -> set[str]:
        """Attributes with objects that the first sample created, such as an open file, but not with plain values."""
        return {path.rpartition(".")[2] for path, part in self.opened.items() if type(part) not in PLAIN}

    @property
    def has_no_effects(self) -> bool:
        """Whether the code that makes samples names nothing that prints, logs or writes, and there was no output."""
        return not (self._executed.user_names & OUTPUT) and output_size() == 0

    @property
    def may_print(self) -> bool:
        """Whether any sample may print, log or write, judging by the names in the user's code."""
        return bool(self.loaded and self._executed.user_names & PRINTS) or output_size() > 0

    @property
    def may_draw(self) -> bool:
        """Whether any sample may draw random numbers, judging by the names in the user's code."""
        names = self._executed.user_names if self.loaded and not self.draws else set()
        return self.draws or may_draw(names)

    @property
    def forgets(self) -> str:
        """A function with ``lru_cache`` of limited size, whose content depends on each call; "" if there is none."""
        limited = (f for f in self.caches if f.cache_parameters()["maxsize"] is not None)
        return next((str(getattr(f, "__name__", f)) for f in limited), "")

    @property
    def made_once(self) -> str:
        """Describes what loading the first sample opens or sets in each process; "" if nothing. Plain data of datasets
        do not count; ``TrialResult.assigns`` tells of them."""
        places = Fingerprint(self.dataset).places
        own = {f"dataset[0]{places.get(id(x), '').removeprefix('dataset')}" for x in inner_datasets(self.dataset)}
        shared = {path for path in _roots(self.made) if path.rpartition(".")[0] not in own}
        read = {path for path in shared if not _names((path,)).isdisjoint(self._executed.user_names)}
        opaque = {path for path, entry in self.made.items() if entry.is_opaque}
        once = (opaque | read) - self.of_thread
        made = sorted(path for path in once if path.startswith("dataset[0]") and "[]" not in path)
        verb = "opens" if self.opens else "sets"
        return f"each process {verb} {readable((self.opens or made)[0])} once" if self.opens or made else ""

    @property
    def only_in_workers(self) -> str:
        """Why a worker that has made samples differs from a new one; "" if it does not."""
        if self.only_together:
            return self.only_together
        if self.caches:
            return "a function with lru_cache remembers in each process what it returned there"
        if self.made_once:
            return self.made_once
        named = sorted(self._executed.user_names & OF_PROCESS)
        drawing = named or sorted(filter(None, map(_foreign_generator, functions_of(self.dataset))))
        return f"its code names {drawing[0]}" if drawing else ""

    @functools.cached_property
    def _executed(self) -> Executed:
        code = Executed(self.dataset, Inputs(self.dataset, digests=False).objects)
        self.seed_anew()
        code.run(lambda: self.make(self.loaded[0]))
        if self._makes_batches:
            with contextlib.suppress(Exception):  # the user's
                code.run(lambda: self.dataset.__getitems__(self.loaded))  # type: ignore[attr-defined]
        return code

    @property
    def _makes_batches(self) -> bool:
        """Whether the loader asks for all samples of a batch at once."""
        inner = without_subsets(self.dataset)  # a subset delegates to it, or asks for samples one at a time
        return not self.by_batch and callable(getattr(inner, "__getitems__", None))

    def whole(self, i: Index) -> Whole:
        """Returns a sample as made by the dataset; makes the first samples only once."""
        return self._wholes.get(repr(i)) or self.load(i)

    def batches_differ(self) -> str:
        """Why samples must not be requested one at a time; "" if they may be."""
        if not self._makes_batches:
            return ""
        for indices in (self.loaded, self.loaded[:0:-1]):  # the second time without the dataset's first sample
            before = self.seed(5)
            together = list(self.dataset.__getitems__(indices))  # type: ignore[attr-defined]
            self.draws |= bool(before.moved())
            after = self.states().in_order()
            self.seed(5)
            alone = [self.dataset[i] for i in indices]
            if not equal_bits(together, alone) or self.states().in_order() != after:
                self.only_together = "its __getitems__ returns other samples than __getitem__"
                break
        else:
            self.only_together = self._done_by_batch()
        return self.only_together

    def _done_by_batch(self) -> str:
        """What the user's ``__getitems__`` may do beside making samples: then samples cannot stand for batches."""
        alone, together = (Executed(self.dataset, self._executed.lasting) for _ in range(2))
        alone.run(lambda: [self.make(i) for i in self.loaded])
        together.run(lambda: self.dataset.__getitems__(self.loaded))  # type: ignore[attr-defined]
        names = together.user_names - alone.user_names - BY_SAMPLE
        written = together.written - alone.written
        if written or names:
            return f"its __getitems__ does more than make samples: it names {min(written or names)}"
        if any(map(has_branches, map(original, together.users_code - alone.users_code))):
            return "its __getitems__ decides something, so that a sample may depend on the others of its batch"
        return ""

    def readable(self) -> tuple[MapDataset, Attributes]:
        """What the dataset's code may read and change: the dataset, and the global variables that the code names."""
        return self.dataset, globals_now(self.variables)
