"""``split``: where a dataset's deterministic part ends, found by trying.

A dataset in the ecosystem's convention calls what lies in its attribute ``transform``, ``target_transform`` or
``transforms``. Its code up to that call and the transforms that prove deterministic are ``prepare``; the first random
transform and all after it are ``augment``.
"""

from __future__ import annotations

import copy
import html
import math
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from ..cache.leaves import CacheError, take
from ..errors import UsageError
from .apart import apart
from .chain import Call, Chain, flat, outcome
from .chance import judge, label, same
from .cut import Step, choose
from .hooks import REMEDY, clone, hooks, put
from .marks import Called, Touched, marked, replace
from .shrink import offer

TRIES = 3  # samples that are tried
PICTURES = 16  # samples, at most, that are looked at for what could be decoded small


class Place(NamedTuple):
    """In a stored sample, where a transform's result belongs: of which call, and which of its values."""

    call: int
    key: Any


class Stored(NamedTuple):
    """What is kept of a sample that is to be augmented: it with places in it, and each call's hook, args, kwargs."""

    sample: Any
    calls: Any


class Row(NamedTuple):
    """One stage in the report.

    Attributes:
        where: the attribute it came from; "__getitem__" for the dataset's own code.
        name: the stage.
        cached: whether what it makes is kept.
        why: what was seen.
    """

    where: str
    name: str
    cached: bool
    why: str


class Unjudged(CacheError):
    """A sample goes a way that nobody has tried: it is made as a whole, each time."""


_here = threading.local()


class _Hook:
    """Stands where a transform stood: runs its deterministic part and notes with what the rest is to be called."""

    def __init__(self, number: int, prefix: Chain) -> None:
        self.number, self.prefix = number, prefix

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.prefix.call(args, kwargs)
        called = Called(len(_here.calls), self.number, args, kwargs)
        _here.calls.append(called)
        return marked(called)


def map_style(dataset: Any) -> None:
    """Raises ``UsageError`` for what has no samples to ask for by index."""
    if isinstance(dataset, IterableDataset) or not all(hasattr(dataset, n) for n in ("__getitem__", "__len__")):
        raise UsageError(
            f"{type(dataset).__name__} has no samples to ask for by index: staging wants a map-style dataset, with "
            "__getitem__ and __len__"
        )


class Split:
    """A dataset in two parts; made by ``split``.

    Attributes:
        dataset: the whole.
        rows: the stages in order, each with why it is kept or not.
        exact: a sample is kept as it is: nothing is random, and nothing was left out by ``fit``.
        offer: in words, what decoding pictures small would bring and change, measured; "" where it would not.
    """

    def __init__(self, dataset: Any) -> None:
        map_style(dataset)
        if not len(dataset):
            raise UsageError(f"{type(dataset).__name__} is empty")
        self.dataset = dataset
        self.rows: list[Row] = []
        self.exact = False
        self._rest: list[Chain] = []
        found = apart(self._find)
        self.rows = [Row(*row) for row in found["rows"]]
        self.offer: str = found["offer"]
        self._plans, self._read_s, self._nbytes = found["plans"], found["read_s"], found["nbytes"]
        self._build(self._plans)

    def fit(self, budget: float) -> None:
        """Where not all samples fit, keeps less of each if that makes an epoch shorter: see ``cut``.

        Args:
            budget: bytes.
        """
        called = [plan for plan in self._plans if plan["called"]]
        if not called or not budget < self._nbytes * len(self.dataset) < math.inf:
            return
        plan = max(called, key=lambda plan: float(plan["steps"][-1][0]))
        steps = [Step(*step) for step in plan["steps"]]
        other = self._nbytes - steps[-1].nbytes
        cut = choose(steps, self._read_s, max(0.0, other), budget / len(self.dataset))
        if cut == plan["kept"]:
            return
        small = max(0.0, other) + steps[cut].nbytes
        why = f"the same each time, but what goes into it is smaller: {small:,.0f} bytes, not {self._nbytes:,.0f}"
        for k in range(cut, plan["kept"]):
            self.rows[plan["row"] + k] = self.rows[plan["row"] + k]._replace(cached=False, why=why)
            why = "the same each time; what goes into the one before it is kept"
        plan["kept"] = cut
        self._build(self._plans)

    # -- serving

    def prepare(self, index: Any) -> Any:
        """The deterministic part: what is to be kept of a sample."""
        sample, calls = self._read(index)
        if self.exact:
            if any(self._rest[c.hook].transforms for c in calls):
                raise Unjudged("a transform is called that was not for the samples that were tried")
            return replace(sample, lambda c, key: _value(outcome(c.args, c.kwargs), c.args, c.kwargs, key))

        def place(c: Called, key: Any) -> Place:
            if c.place >= len(calls) or calls[c.place] is not c:
                raise CacheError("the dataset handed out what its transform returned for another sample")
            return Place(c.place, key)

        return Stored(replace(sample, place), [(c.hook, c.args, c.kwargs) for c in calls])

    def augment(self, stored: Any) -> Any:
        """The random part, and the sample whole."""
        results = [self._rest[hook](*args, **kwargs) for hook, args, kwargs in stored.calls]

        def result(place: Place) -> Any:
            _, args, kwargs = stored.calls[place.call]
            return _value(results[place.call], args, kwargs, place.key)

        return _fill(stored.sample, result)

    def _read(self, index: Any) -> tuple[Any, list[Called]]:
        before = getattr(_here, "calls", None)  # a dataset inside another one's transform
        calls: list[Called] = []
        _here.calls = calls
        try:
            return self._base[index], calls
        finally:
            _here.calls = before

    # -- finding

    def _find(self) -> dict[str, Any]:
        """Tries, in a process of its own. Returns rows, and for each hook what ``_build`` wants to know."""
        hooked = self._hooked()
        n = len(self.dataset)
        tries = sorted({0, n // 2, n - 1})[:TRIES]
        calls = self._judge_reading(tries, [where for where, *_ in hooked])
        plans: list[dict[str, Any]] = []
        for number, (where, _, _, pipeline) in enumerate(hooked):
            inputs = [(c.args, c.kwargs) for c in calls if c.hook == number]
            # One that is not called leaves its work to another one of them.
            often = len(inputs) / len(tries)
            plans.append(self._judge_pipeline(where, pipeline, inputs, often) if inputs else {"called": False})
        self._build(plans)
        self._verify(tries, [pipeline for *_, pipeline in hooked])
        began = time.perf_counter()
        made = [self.prepare(i) for i in tries]
        spent = (time.perf_counter() - began) / len(tries)
        later = sum(step.seconds for plan in plans for step in plan.get("steps", ()))
        return {
            "rows": self.rows,
            "plans": plans,
            "read_s": max(0.0, spent - later),
            "nbytes": sum(map(_nbytes, made)) / len(tries),
            "offer": offer(self.prepare, range(0, n, max(1, n // PICTURES))),
        }

    def _hooked(self) -> list[tuple[str, Any, str, Any]]:
        """A clone with a hook in each transform's place, as ``_base``: where, holder, attribute, pipeline of each."""
        self._base, owners = clone(self.dataset)
        hooked: list[tuple[str, Any, str, Any]] = []
        for path, owner in owners:
            for where, holder, attribute in hooks(path, owner):
                hooked.append((where, holder, attribute, getattr(holder, attribute)))
        for number, (_, holder, attribute, _) in enumerate(hooked):
            self._hook(holder, attribute, _Hook(number, Chain([])))
        return hooked

    def _build(self, plans: list[dict[str, Any]]) -> None:
        """The two parts, from what was found out."""
        self._rest = []
        self.exact = True
        for number, (_, holder, attribute, pipeline) in enumerate(self._hooked()):
            plan = plans[number]
            answers = iter(plan.get("same", ()))
            if not plan["called"]:
                self._rest.append(Chain(pipeline if isinstance(pipeline, (list, tuple)) else [pipeline]))
                continue
            stages = flat(pipeline, lambda whole, parts, answers=answers: next(answers))  # type: ignore[misc]
            self._rest.append(Chain(stages[plan["kept"] :]))
            self.exact = self.exact and plan["kept"] == len(stages)
            self._hook(holder, attribute, _Hook(number, Chain(stages[: plan["kept"]])))

    def _hook(self, holder: Any, attribute: str, hook: _Hook) -> None:
        # Code that goes through a list of transforms goes through a list of one.
        put(holder, attribute, [hook] if isinstance(getattr(holder, attribute), (list, tuple)) else hook)

    def _judge_reading(self, tries: list[int], wheres: list[str]) -> list[Called]:
        """Whether the dataset's own code is deterministic. Returns its calls of the hooks."""
        calls: list[Called] = []

        def read(index: int) -> Any:
            sample, called = self._read(index)
            calls.extend(called)
            return replace(sample, lambda c, key: Place(c.place, key)), [(c.hook, c.args, c.kwargs) for c in called]

        name = type(self.dataset).__name__
        try:
            verdict = judge(read, [((i,), {}) for i in tries], walk=self._base)
        except Touched as e:  # judge lets this one through
            raise UsageError(
                f"{name} cannot be split: its __getitem__ does something with what {_or(wheres)} returned ({e}), and "
                f"that may be random. {REMEDY}"
            ) from None
        if not verdict.deterministic:
            raise UsageError(f"{name} cannot be split: its __getitem__ itself {verdict.why}. {REMEDY}")
        if wheres and not calls:
            raise UsageError(f"{name} cannot be split: its __getitem__ does not call {_or(wheres)}. {REMEDY}")
        self.rows.append(Row("__getitem__", "", True, verdict.why))
        return calls

    def _judge_pipeline(self, where: str, pipeline: Any, inputs: list[Call], often: float) -> dict[str, Any]:
        """How many transforms come before the first random one, and which pipelines inside it were taken apart.

        Args:
            often: calls of the pipeline for a sample.
        """
        answers: list[bool] = []

        def asked(whole: Any, parts: list[Any]) -> bool:
            answers.append(same(whole, Chain(parts), inputs[:1]))
            return answers[-1]

        stages = flat(pipeline, asked)
        alone = len(stages) == 1
        kept, row = len(stages), len(self.rows)
        inputs = inputs[:TRIES]
        steps = [Step(often * sum(map(_nbytes, inputs)) / len(inputs), 0.0)]
        for k, stage in enumerate(stages):
            name = where if alone else f"{where}[{k}]"
            if k > kept:
                self.rows.append(Row(name, label(stage), False, "comes after a random one"))
                continue
            verdict = judge(stage, inputs)
            self.rows.append(Row(name, label(stage), verdict.deterministic, verdict.why))
            if verdict.deterministic:
                inputs = copy.deepcopy(inputs)
                began = time.perf_counter()
                inputs = [Chain([stage]).call(*call) for call in inputs]
                each = often / len(inputs)
                spent = time.perf_counter() - began
                steps.append(Step(each * sum(map(_nbytes, inputs)), each * spent))
            else:
                kept = k
        return {"called": True, "same": answers, "kept": kept, "steps": steps, "row": row}

    def _verify(self, tries: list[int], pipelines: list[Any]) -> None:
        """The two parts give what the whole gives, to the bit, from the same random states."""

        def whole(i: int) -> Any:
            return self.dataset[i]

        def parts(i: int) -> Any:
            stored = self.prepare(i)
            return stored if self.exact else self.augment(stored)

        for i in tries:
            call: Call = ((i,), {})
            if not same(whole, parts, [call], pipelines):
                raise UsageError(
                    f"{type(self.dataset).__name__} cannot be split: sample {i} in two parts is not what it is in one. "
                    f"{REMEDY}"
                )

    # -- saying

    def __str__(self) -> str:
        wide = [max(len(str(row[k])) for row in self.rows) for k in (0, 1)]
        lines = []
        for row in self.rows:
            kept = "cached   " if row.cached else "each time"
            lines.append(f"{kept}  {row.where:{wide[0]}}  {row.name:{wide[1]}}  {row.why}")
        return "\n".join([*lines, self.offer] if self.offer else lines)

    def __repr__(self) -> str:
        kept = sum(row.cached for row in self.rows)
        return f"<Split of {type(self.dataset).__name__}: {kept} of {len(self.rows)} stages are deterministic>"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{'cached' if r.cached else 'each time'}</td><td>{html.escape(r.where)}</td>"
            f"<td>{html.escape(r.name)}</td><td>{html.escape(r.why)}</td></tr>"
            for r in self.rows
        )
        table = f"<table><tr><th></th><th>where</th><th>stage</th><th>why</th></tr>{rows}</table>"
        return f"{table}<p>{html.escape(self.offer)}</p>" if self.offer else table


def split(dataset: Any) -> Split:
    """Finds the border between what is the same in every epoch and what is random.

    Tries a few samples, in copies of the dataset and of its transforms, under other random states each time. A
    transform is random if it moves a generator (Python's, NumPy's, torch's, its own), gives other bits on a repeat,
    keeps a state, or cannot be told. The process' random states are left as they were.

    Args:
        dataset: map-style, with its transforms in ``transform``, ``target_transform`` or ``transforms``, which may
            be a callable, a list, ``nn.Sequential`` or any ``Compose``; or a ``Subset`` or ``ConcatDataset`` of such.
            A dataset without these whose ``__getitem__`` proves deterministic is kept whole.

    Returns:
        A ``Split``; printed, it says what is kept and why. ``stoker.Staged(dataset)`` uses it.

    Raises:
        UsageError: no border can be found; the message says why, and what to do.

    Example:
        >>> import torch
        >>> class Photos(torch.utils.data.Dataset):
        ...     transform = [torch.Tensor.float, torch.rand_like]
        ...     def __len__(self):
        ...         return 4
        ...     def __getitem__(self, i):
        ...         x = torch.full((2,), i)
        ...         for t in self.transform if isinstance(self.transform, list) else [self.transform]:
        ...             x = t(x)
        ...         return x
        >>> [(row.name, row.cached) for row in split(Photos()).rows]
        [('', True), ('float', True), ('rand_like', False)]
    """
    return Split(dataset)


def _nbytes(sample: Any) -> float:
    """What keeping it takes; inf where it cannot be kept."""
    try:
        return float(sum(x.nbytes for x in take(sample)[1]))
    except CacheError:
        return math.inf


def _value(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any) -> Any:
    return result if not kwargs and len(args) == 1 else result[key]


def _fill(sample: Any, put: Callable[[Place], Any]) -> Any:
    kind = type(sample)
    if kind is Place:
        return put(sample)
    if kind is dict:
        return {k: _fill(v, put) for k, v in sample.items()}
    if kind is list:
        return [_fill(v, put) for v in sample]
    if isinstance(sample, tuple):
        items = [_fill(v, put) for v in sample]
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    return sample


def _or(names: list[str]) -> str:
    return " or ".join(f"self.{n}" for n in names)
