"""Verifies on samples that a plan's two parts give the same result and side effects as the whole.

Each sample is made as a whole, and in two parts with the first part under other random states. Then:

1. the sample must have the same bits, and all generators the same states afterwards;
2. the first part, run again, must give the same bits, draw nothing, and have no variables that share memory;
3. the first part must change nothing that outlives it: the dataset, global variables, files, output (``_verify_fresh``,
   with a sample that was never loaded before);
4. it must not read what loading a sample changes, the clock, the system's entropy, or an iterator.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import time
import types
from collections import deque
from collections.abc import Collection, Iterator
from typing import NoReturn

import numpy as np

from ..core.compare import equal_bits
from ..core.dataset_tree import inner_datasets
from ..core.errors import one_line
from ..core.fingerprint import Fingerprint
from ..core.object_tree import CONTAINERS, PLAIN, children, is_table, walk
from ..core.random_state import PROCESS_WIDE
from ..core.types import Attributes
from .aliases import hold_one_object, refuse_aliases, share_memory
from .callee import Call, callee_of
from .containers import READ_OF_MODULES, items_of
from .executed_code import PRINTS, Executed
from .inputs import Inputs
from .isolate import classes_unpickled, output_size
from .own_caches import emptied
from .plan import Boxed, CutNode, Plan, PreparedState, Unplanned, globals_now, nodes_in
from .samples import MadeFrom, TrialSamples
from .store.decode import Layout, stored_copy
from .store.encode import CacheError, pickled, take
from .switches import names_stored
from .syntax import ANY_NAME
from .users_code import is_users_code, runs_library_code

READS = 3  # of the cached state; the fastest counts
NAMES = 16  # maximum number of attributes tested for being written before they are read
TAILS, TAILS_S = 9, 0.1  # maximum number of timed runs of a second part, and time limit in seconds
REPEATS, REPEATS_S = 64, 0.2  # of a second part that may write to its input, and time limit in seconds
LEAST_REPEATS = 4
CHANGES = "the part before the cut changes data that outlives a sample"
GLOBAL = set(PROCESS_WIDE)


def verify(plan: Plan, samples: TrialSamples, changing: Collection[str] = ()) -> str:
    """Verifies a plan and fills in its figures. Returns why it must not be used; "" if it may be. The first part must
    not read what the script changes in each epoch (``changing``)."""
    plan.own_caches = samples.own_caches
    verification = _Verification(plan, samples, changing)
    try:
        verification.run()
    except Unplanned:
        return "not all samples run the same path through the code"
    except CacheError as e:
        return _asked(verification.code) or str(e)  # what it reads from the system explains the differing bits
    except Exception as e:
        if Boxed.__name__ in str(e):
            return "a container inspects the result of one of its transforms, so that transform cannot be cut"
        return f"a sample fails when it is made in two parts: {one_line(e)}"
    code = verification.code
    why = _reads_what_changes(plan, samples, code, changing)
    if why:
        return why
    names_in_tail = verification.names_in_tail() if plan.own_caches else set()
    for name in sorted({path[-1] for path in plan.own_caches} & names_in_tail):
        return f"the part after the cut reads {name}, where the dataset keeps what it loaded"
    made_from = _made_from(plan, samples, samples.may_read(code.names))
    plan.globals = sorted(code.variables | made_from.variables | classes_unpickled())
    is_native = callee_of(samples.dataset.__getitem__) is None  # what native code reads is unknown
    is_unknown = code.looks_up_names or made_from.looks_up_names or is_native or verification.holds_objects
    plan.reads = None if is_unknown else samples.may_read(code.names | made_from.names | READ_OF_MODULES)
    plan.tail_s = verification.tail_time()
    return ""


def _made_from(plan: Plan, samples: TrialSamples, reads: set[str]) -> MadeFrom:
    cuts = [cut for node in nodes_in(plan.root) if isinstance(node, CutNode) for cut in node.rewritten.values()]
    stored = set().union(*(names_stored(parts.head.__code__) for _, parts in cuts))
    return samples.made_from(reads, stored, [fn for fn, _ in cuts])


def _asked(code: Executed) -> str:
    if code.asks in PRINTS:
        return f"the part before the cut prints or logs something: it calls {code.asks}"
    return f"the part before the cut asks {code.asks}, which answers differently each time" if code.asks else ""


def _reads_what_changes(plan: Plan, samples: TrialSamples, code: Executed, changing: Collection[str]) -> str:
    if code.changes:
        return f"{CHANGES}: {code.changes}"
    if code.asks:
        return _asked(code)
    reads = samples.may_read(code.names)
    for path in samples.changes:
        names = {changed_name(path), *re.findall(r"\['(\w+)'\]", path)}  # a module's buffers are items
        place = re.sub(r"^dataset|[^.[]*$", "", path.replace("dataset[0]", "dataset", 1)).rstrip(".[")
        held = next((x for _, x in _along(samples.dataset, place) if _is_of_library(x)), None)
        if held is not None and not reads.isdisjoint(_names_of(held, samples.readable())):
            names.add("")  # which of its own attributes it reads is unknown
        is_outside = not path.startswith("dataset")  # the environment, settings of libraries
        if (is_outside or not names.isdisjoint(code.names | {""})) and not lies_in(path, plan.scratch):
            return f"loading a sample changes data that the part before the cut reads: {readable_change(path)}"
    if ANY_NAME in samples.written:
        return "loading a sample sets attributes with computed names"
    for name in sorted(code.names & (samples.assigned | samples.written)):
        return f"loading some samples may change data that the part before the cut reads: {name}"
    unread = {path.rpartition(".")[2] for path in plan.scratch} - code.user_names
    made_from = _made_from(plan, samples, reads).names if changing else set()
    for name in sorted((code.names - unread | made_from).intersection(changing)):
        return f"in each epoch the script changes data that the part before the cut reads: {name}"
    iterator = _iterator_read(samples, code)
    return f"the part before the cut may read an iterator: {iterator}" if iterator else ""


class _Verification:
    """Verifies one plan on some samples."""

    def __init__(self, plan: Plan, samples: TrialSamples, changing: Collection[str]) -> None:
        self._inputs = Inputs(samples.dataset)
        self.code = Executed(samples.dataset, self._inputs.objects)  # inspects the code of the first part
        self.holds_objects = False  # the state holds objects of the dataset, of which the second part may read anything
        self._plan = plan
        self._samples = samples
        self._changing = set(changing)

    def run(self) -> None:
        """Verifies the plan, and fills in what the first loaded samples cost. Raises CacheError if the plan must not be
        used; Unplanned if not all samples take the same branch."""
        plan, costs = self._plan, [self._verify_sample(i, None) for i in self._samples.loaded[:2]]
        head_s, read_s, nbytes = zip(*costs, strict=True)
        # The shortest times: other load on the machine only adds to them.
        plan.head_s, plan.read_s, plan.nbytes = min(head_s), min(read_s), float(np.mean(nbytes))
        plan.scratch = self._attributes_not_read()
        while not self._verify_fresh():
            pass
        plan.stores = self.code.stored_in_lasting
        if not plan.exact:
            self._verify_handed_over()

    def _head(self, i: int) -> PreparedState:
        return self._plan.head(self._samples.dataset, i)

    def _verify_sample(self, i: int, first_state: tuple[PreparedState] | None) -> tuple[float, float, float]:
        """Compares the parts of a sample with the whole. Returns the seconds of the first part, those to read it from
        memory, and its bytes. ``first_state``: earlier result of the first part under other random states; None: run it
        again. Raises CacheError if they differ or the first part cannot be cached; the message says why."""
        samples, plan = self._samples, self._plan
        whole = samples.whole(i)
        states = samples.seed_anew()
        began = time.perf_counter()
        state = self._head(i)
        head_s = time.perf_counter() - began
        moved = states.moved()
        refuse_aliases(state, samples.dataset)
        kept = Kept(state)
        read_s = min(kept.time_of_reading() for _ in range(READS))  # the first read maps new memory
        argument = kept.read()
        samples.seed_as_wholes()
        sample = plan.tail(samples.dataset, argument)
        states_after = samples.states().in_order()
        samples.seed_anew()
        again = first_state[0] if first_state else self.code.run(lambda: self._head(i))
        if not equal_bits(kept.read(), stored_copy(again)):
            samples.varies = True
            raise CacheError("the part before the cut returns a different result when repeated")
        self.holds_objects |= hold_one_object(state, again)
        if not plan.exact and (share_memory(state, again) or self._is_kept_by_dataset(i)):
            self._verify_unwritten(kept)
        if not equal_bits(whole.value, sample):
            on = f", which may depend on {readable_change(samples.changes[0])}" if samples.changes else ""
            raise CacheError(f"sample {i} differs when it is made in two parts{on}")
        only_containers = plan.slices and not GLOBAL & set(moved)
        if (moved and not only_containers) or whole.states != states_after:
            raise CacheError("the part before the cut draws random numbers")
        plan.moves = sorted({*plan.moves, *moved})
        plan.pickled = plan.pickled or kept.pickled
        return head_s, read_s, kept.nbytes

    def _verify_handed_over(self) -> None:
        """Checks that the second part does not read what a library's object keeps of the first part. The containers
        that a plan cuts keep something in either part: of that, it must not read what is there when it begins."""
        samples = self._samples
        places = Fingerprint(samples.readable()).places
        kept = {
            f"{places[id(x)]}.{name}": x
            for name, objects in self.code.stored.items()
            for x in objects
            if id(x) in places and id(x) in self._inputs.objects and runs_library_code(type(x))
        }
        read = samples.may_read(self.names_in_tail()) if kept else set()
        of_containers = set()
        for path, x in kept.items():
            holders = [held for _, held in _along(samples.readable(), path.removeprefix("dataset"))]
            if self._plan.slices and any(items_of(held) is not None for held in holders):
                of_containers.add(path)
            elif not read.isdisjoint(_names_of(next(filter(_is_of_library, holders), x), samples.readable())):
                why = f"the part after the cut may read {readable_change(path)}, which the part before it sets"
                raise CacheError(why)
        if of_containers:
            self._verify_unread(of_containers)

    def _verify_unread(self, paths: Collection[str]) -> None:
        """Checks that the second part gives the same if these attributes are unusable when it begins."""
        samples = self._samples
        kept = Kept(self._head(samples.loaded[0]))
        samples.seed_anew()
        states = samples.states()
        expected = stored_copy(self._plan.tail(samples.dataset, kept.read()))
        before = make_unusable(samples.readable(), paths)
        states.restore()
        try:
            is_same = equal_bits(stored_copy(self._plan.tail(samples.dataset, kept.read())), expected)
        except TypeError:
            is_same = False
        finally:
            for attributes, name, value in before:
                if attributes[name] is _UNUSABLE:
                    attributes[name] = value
        if not is_same:
            why = f"the part after the cut reads what the part before it sets: {readable_change(min(paths))}"
            raise CacheError(why)

    def _is_kept_by_dataset(self, i: int) -> bool:
        """Whether the first part returns what the dataset's own cache holds."""
        dataset, caches = self._samples.dataset, self._plan.own_caches
        call = Call(dataset.__getitem__, (i,), {})
        with emptied(dataset, caches):
            first, second = (self._plan.root.head(call) for _ in range(2)) if caches else (None, None)
        return share_memory(first, second) or hold_one_object(first, second)

    def names_in_tail(self) -> set[str]:
        """Names in the code of the second part, and in the user's functions that it names."""
        code, state = Executed(self._samples.dataset), Kept(self._head(self._samples.loaded[0])).read()
        self._samples.seed_anew()
        with contextlib.suppress(Exception, Unplanned):  # fails for some random numbers
            code.run(lambda: self._plan.tail(self._samples.dataset, state))
        return code.names

    def tail_time(self) -> float:
        """Mean seconds of the second part over random states: some branches load another sample."""
        state = Kept(self._head(self._samples.loaded[0]))
        spent: list[float] = []
        began = time.perf_counter()
        while len(spent) < TAILS and time.perf_counter() - began < TAILS_S:
            argument = state.read()
            self._samples.seed_anew()
            start = time.perf_counter()
            with contextlib.suppress(Exception, Unplanned):  # fails for some random numbers
                self._plan.tail(self._samples.dataset, argument)
            spent.append(time.perf_counter() - start)
        return float(np.mean(sorted(spent)[: max(1, len(spent) - 1)]))  # not the longest: the machine may be busy

    def _verify_unwritten(self, kept: Kept) -> None:
        """Checks that the second part does not write to the first part's result, which is memory of the dataset."""
        began = time.perf_counter()
        for k in range(REPEATS):  # it may write in some branches only
            if k >= LEAST_REPEATS and time.perf_counter() - began > REPEATS_S:
                break
            argument = kept.read()
            self._samples.seed_anew()
            self._plan.tail(self._samples.dataset, argument)
            if not equal_bits(argument, kept.read()):
                raise CacheError("the part after the cut writes to memory that the dataset owns")

    def _changing_and_not_named(self) -> Iterator[tuple[str, list[object]]]:
        """Attributes that the script changes in each epoch and only library code names: images have a ``size``, too."""
        datasets = list(inner_datasets(self._samples.dataset))
        for name in self._changing - self.code.user_names:
            holders = [x for x in datasets if name in own_attributes(x) and not _library_names(type(x), name)]
            if holders:
                yield name, holders

    def _attributes_not_read(self) -> set[str]:
        """Paths of attributes that the first part does not read, or writes before reading. Tests those that loading a
        sample writes (albumentations' and MONAI's transforms record their last call on themselves), and those that the
        script changes in each epoch. The test replaces their values by an unusable object."""
        samples, i = self._samples, self._samples.loaded[0]
        whole = Executed(samples.dataset)
        samples.seed_anew()
        whole.run(lambda: samples.make(i))
        samples.seed_anew()
        expected = stored_copy(self._head(i))
        places = Fingerprint(samples.readable()).places
        holders = (
            (name, [x for x in objects if id(x) in places and name in own_attributes(x)])
            for name, objects in whole.stored.items()
        )
        written = itertools.islice((held for held in holders if held[1]), NAMES)
        out: set[str] = set()
        for name, objects in [*written, *self._changing_and_not_named()]:
            values = [own_attributes(x)[name] for x in objects]
            for x in objects:
                own_attributes(x)[name] = _UNUSABLE
            try:
                samples.seed_anew()
                if equal_bits(stored_copy(self._head(i)), expected):
                    out.update(f"{places[id(x)]}.{name}" for x in objects)
            except (Exception, Unplanned):
                pass  # it was read
            finally:
                for x, value in zip(objects, values, strict=True):
                    own_attributes(x)[name] = value
        return out

    def _verify_fresh(self) -> bool:
        """Checks that the first part of a sample never loaded before changes nothing visible, which detects per-sample
        bookkeeping. Returns False if that sample cannot be loaded at all, so another must be tried."""
        samples = self._samples
        known = samples.loaded[-1]
        fresh = samples.fresh.pop(0) if samples.fresh else known
        try:
            self._verify_changes_nothing(fresh)
        except Exception as e:
            if isinstance(e, CacheError) or fresh == known:
                raise
            try:
                samples.load(fresh)
            except Exception:
                return False
            raise
        if fresh != known:
            samples.loaded.append(fresh)
        return True

    def _verify_changes_nothing(self, fresh: int) -> None:
        samples = self._samples
        samples.variables |= self.code.variables
        readable = samples.readable()
        before = Fingerprint(readable, skip=self._plan.scratch)
        written, printed = file_positions(readable), output_size()  # in this order: positions are correct after a flush
        samples.seed_anew()
        state = stored_copy(self.code.run(lambda: self._head(fresh)))  # before anything else writes to it
        changes = before.changed(samples.readable())
        if changes:
            raise CacheError(f"{CHANGES}: {readable_change(changes[0])}")
        if output_size() != printed:
            raise CacheError("the part before the cut prints or logs something")
        if file_positions(readable) != written:
            raise CacheError("the part before the cut writes to a file")
        before = Fingerprint(samples.readable())
        self._verify_sample(fresh, (state,))
        samples.changes += before.changed(samples.readable())


class Kept:
    """A state or call result in the form in which a store holds it. Raises CacheError if it cannot be stored."""

    def __init__(self, state: PreparedState) -> None:
        self._text, leaves = take(state)
        self.pickled = pickled(self._text)
        self._leaves = [x.copy() for x in leaves]
        self.nbytes = float(sum(x.nbytes for x in leaves))

    def read(self) -> PreparedState:
        return Layout(self._text).put(self._leaves)

    def time_of_reading(self) -> float:
        """Seconds to make a copy."""
        began = time.perf_counter()
        self.read()
        return time.perf_counter() - began


class _Unusable:
    """Replaces an attribute's value that must not be read."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("an attribute is read before it is written")

    __getattr__ = __call__ = __bool__ = __len__ = __iter__ = __getitem__ = __contains__ = __eq__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __int__ = __float__ = __index__ = _refuse
    __hash__ = __lt__ = __gt__ = __le__ = __ge__ = __ne__ = __mod__ = __setitem__ = __repr__ = _refuse


_UNUSABLE = _Unusable()


def make_unusable(readable: object, paths: Collection[str]) -> list[tuple[Attributes, str, object]]:
    """Replaces attributes, by path, with an object that must not be read. Returns where, and what was there."""
    before = []
    for path in paths:
        place, _, name = path.removeprefix("dataset").rpartition(".")
        attributes = own_attributes(deque([readable, *(x for _, x in _along(readable, place))], 1)[0])
        if name in attributes:
            before.append((attributes, name, attributes[name]))
            attributes[name] = _UNUSABLE
    return before


def _along(x: object, path: str) -> Iterator[tuple[str, object]]:
    """Yields the steps of a path, each with the object to which it leads, as far as they exist."""
    for step, inner in children(x):
        if f"{path}.".startswith((f"{step}.", f"{step}[")):
            yield step, inner
            yield from _along(inner, path.removeprefix(step))
            return


def _is_of_library(x: object) -> bool:
    """Whether the code of a library may read any attribute of an object."""
    return runs_library_code(type(x)) and not isinstance(x, (*CONTAINERS, *PLAIN))


def _names_of(x: object, readable: object) -> set[str]:
    """Names of the attributes and variables that lead to an object, also through containers."""
    edges = [(holder, step, inner) for _, holder in walk(readable) for step, inner in children(holder)]
    names, found, waiting = set[str](), {id(x)}, [x]
    while waiting:
        x = waiting.pop()
        for holder, step, inner in edges:
            if inner is x:
                names.update(re.findall(r"(\w+)(?:'])?$", step))
                if step[0] == "[" and id(holder) not in found:
                    found.add(id(holder))
                    waiting.append(holder)
    return names


def own_attributes(x: object) -> Attributes:
    attributes = getattr(x, "__dict__", None)
    # excludes classes, whose attributes cannot be written like this, and tables, on which native code relies
    return attributes if isinstance(attributes, dict) and not is_table(x) else {}


def _library_names(cls: type, name: str) -> bool:
    """Whether a method that a class inherits from a library mentions a name."""
    methods = (x for base in cls.__mro__ for x in vars(base).values() if isinstance(x, types.FunctionType))
    return any(not is_users_code(x.__code__) and name in x.__code__.co_names for x in methods)


# -- changes that a Fingerprint of (dataset, global variables) found: "dataset[0].count was 0 and is 1"


def readable_change(change: str) -> str:
    """A change without the root common to all paths."""
    return change.removeprefix("dataset[0]").removeprefix("dataset[1]").removeprefix(".")


def lies_in(change: str, places: set[str]) -> bool:
    """Whether a change of the dataset lies at or below one of some paths."""
    found = change.removeprefix("dataset[0]").removeprefix("dataset")
    return any(re.match(re.escape(place.removeprefix("dataset[0]")) + r"[ .\[]", found + " ") for place in places)


def changed_name(path: str) -> str:
    """Name of the changed attribute or variable: "count" for "dataset.inner.count['a'] was 0 and is 1"."""
    variable = re.match(r"dataset\[1\]\['[^']*?(\w+)'\]", path)
    path = re.sub(r"\[(?:'[^']*'|\"[^\"]*\")\]", "[]", path)
    found = re.match(r".*?(?= was | is |$)", path)
    names = re.findall(r"\.([^\W\d]\w*)", found[0] if found else "")
    return names[-1] if names else variable[1] if variable else ""


def attribute_of_dataset(path: str) -> str:
    """The dataset's own attribute that a change concerns: "count" for "dataset.count was 0 and is 1"."""
    found = re.match(r"dataset(?:\[0\])?\.(\w+)(?:\[[^.]*\])*(?: |$)", path)
    return found[1] if found else ""


# -- what a Fingerprint does not see


def file_positions(roots: object) -> list[int]:
    """Position of each file open for writing."""
    files = (x for _, x in walk(roots) if isinstance(x, io.IOBase))
    return [x.tell() for x in files if not x.closed and x.writable() and x.seekable()]


def _iterator_read(samples: TrialSamples, code: Executed) -> str:
    """Path of an iterator that the code may read, which yields something else each time; "" if there is none."""
    roots = samples.dataset, globals_now(code.variables)
    for path, x in walk(roots, None if code.looks_up_names else code.names):
        if hasattr(type(x), "__next__") and type(x).__module__ in ("builtins", "itertools"):
            return readable_change(path)
    return ""
