"""Python source of datasets, drawn at random: statements, branches, helpers, containers, state, exceptions.

``source_of(random.Random(7))`` is a module's text. It defines ``build()``, which makes the dataset anew, and ``change``,
which a training script might do to it between two epochs. Variables in the drawn code are NumPy arrays (``a``), tensors
(``t``) and numbers (``n``); arrays and tensors have four items, so any statement can follow any other.
"""

from __future__ import annotations

import random
import textwrap

HEADER = """
import contextlib
import functools
import random
import threading
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset

MODULE_RNG = np.random.default_rng(77)
LOCK = threading.Lock()
COUNTER = 0
TABLE = np.arange(40.0).reshape(10, 4)


def load(index):
    out = np.arange(4.0) + index
    for _ in range(20):
        out = np.sqrt(out * out + 0.5)
    return out


def double(x):
    return x * 2


def shake(x):
    return x + random.random()


def np_shake(x):
    return x + np.random.normal()


def torch_shake(x):
    return x + float(torch.rand(()))


def rarely(x):
    return -x if random.random() < 0.2 else x


def spread(*args, scale=2.0, **more):
    return sum(args) * scale + more.get("plus", 0.0)


def ones(x):
    for k in range(3):
        yield x + k


def random_ones(x):
    for k in range(2):
        yield x + random.random()


def shown(fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        return fn(*args, **kwargs)

    return wrapper


def shaken(fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        return fn(*args, **kwargs) + random.random()

    return wrapper


@shown
def tripled(x):
    x = x * 1.5
    return x * 2


@shaken
def tripled_shaken(x):
    return x * 3


def counted(x):
    global COUNTER
    COUNTER += 1
    return x + COUNTER % 3


def write_in(x):
    x *= 1.25
    return x


def closure(k):
    def add(x):
        return x + k

    return add


def sometimes_fails(x, index):
    if index % 5 == 3:
        raise ValueError(f"sample {index}")
    return x + 1


@contextlib.contextmanager
def scaled(value):
    yield value * 2


@contextlib.contextmanager
def seeded(seed):
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)


class Resource:
    def __init__(self, k):
        self.k, self.closed = k, False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.closed = True

    def read(self, x):
        assert not self.closed
        return x + self.k


class Scale:
    def __init__(self, k):
        self.k = k

    def __call__(self, x):
        return x * self.k


class Jitter:
    def __init__(self, p):
        self.p = p

    def __call__(self, x):
        y = x * 3
        if random.random() < self.p:
            y = y + np.random.normal()
        return y


class Owns:
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def __call__(self, x):
        return x + self.rng.random()


class Counts:
    def __init__(self):
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return x + self.calls % 4


class InPlace:
    def __call__(self, x):
        x += 1
        return x


class Both:
    def __init__(self, *steps):
        self.first, self.last = steps[0], steps[-1]

    def __call__(self, x, y):
        return self.first(x), self.last(y)


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, x):
        for t in self.transforms:
            x = t(x)
        return x


class Chain:
    def __init__(self, *ops):
        self.ops = list(ops)

    def __call__(self, x):
        for op in self.ops:
            x = op(x)
        return x


class Keyword:
    def __init__(self, steps):
        self.transforms = steps

    def __call__(self, **data):
        for t in self.transforms:
            data["image"] = t(data["image"])
        return data


class Gate:
    def __init__(self, transforms, p):
        self.transforms, self.p = transforms, p

    def __call__(self, x):
        if random.random() < self.p:
            for t in self.transforms:
                x = t(x)
        return x


class Layer(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.k = k

    def forward(self, x):
        return x * self.k


class Noise(nn.Module):
    def forward(self, x):
        return x + float(torch.rand(()))


class Around(Dataset):
    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        x = self.inner[index]
        y = random.random()
        return x, y


class Twice(Dataset):
    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        return self.inner[index], self.inner[(index * 3 + 1) % len(self.inner)]


class Mixed(Dataset):
    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        first = self.inner[index]
        other = self.inner[random.randrange(len(self.inner))]
        return first, other
"""

DRAWS = (
    "random.random()",
    "np.random.rand()",
    "float(torch.rand(()))",
    "self.rng.random()",
    "self.np_rng.normal()",
    "float(torch.rand((), generator=self.torch_rng))",
    "MODULE_RNG.random()",
    "random.gauss(0, 1)",
    "np.random.randint(5)",
    "random.choice([0.5, 1.5, 2.5])",
    "self.draw()",
)
NUMBERS = ("index", "self.gain", "len(self.names[index % 3])", "self._Data__secret", "self.__secret", "3", "1.5")
ITEMS = ("Scale(2)", "double", "InPlace()", "closure(3)", "shake", "Jitter(0.5)", "np_shake", "Owns(5)", "Counts()")
ITEMS += ("rarely", "Compose([Scale(3), shake, double])", "Chain(double, Scale(0.5))", "Gate([double, shake], 0.5)")
ITEMS += ("lambda x: x + 1", "lambda x: x * random.random()", "functools.partial(spread, scale=3.0)", "counted")
LAYERS = ("Layer(2)", "Noise()", "Layer(0.5)", "nn.Sequential(Layer(3), Noise(), Layer(2))", "nn.Identity()")


class Writer:
    """Writes the body of one function.

    Args:
        rng: what everything is drawn from.
        own: it is a method, so there is ``self``.
    """

    def __init__(self, rng: random.Random, own: bool = True) -> None:
        self.rng, self.own = rng, own
        self.n = 0

    def name(self, kind: str) -> str:
        self.n += 1
        return f"{kind}{self.n}"

    def one(self, *of: str) -> str:
        return self.rng.choice(of)

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    # -- expressions

    def draw(self) -> str:
        return self.rng.choice([d for d in DRAWS if self.own or "self" not in d])

    def number(self, live: list[str]) -> str:
        have = [x for x in live if x[0] == "n"]
        kinds = [self.rng.choice([x for x in NUMBERS if self.own or "self" not in x])]
        kinds += [self.rng.choice(have)] if have else []
        kinds += [f"float({x}.sum())" for x in live if x[0] in "at"][:1]
        if self.chance(0.2):
            return self.draw()
        return self.rng.choice(kinds)

    def array(self, live: list[str]) -> str:
        have = [x for x in live if x[0] == "a"] or ["load(index)"]
        x, y, n = self.rng.choice(have), self.rng.choice(have), self.number(live)
        plain = ["{x} * 2", "np.sin({x})", "{x} + {n}", "{x} - {y}", "load(index + 1)", "double({x})", "{x}.copy()"]
        plain += ["np.array([v * 2 for v in {x}])", "np.stack([{x}, {y}]).mean(0)", "closure(2)({x})", "tripled({x})"]
        plain += ["spread({x}, {y}, scale={n}, plus=1)", "spread(*[{x}, {y}], **{{'scale': 2.0}})", "({x})[::-1]"]
        plain += ["next(ones({x}))", "list(ones({x}))[2]", "(lambda v: v + 1)({x})", "{x} if index % 2 else {y} + 1"]
        plain += ["np.where({x} > 2, {x}, {y})", "write_in({x})", "np.clip({x}, 0, {n})", "[{x}, {y}][index % 2]"]
        plain += ["TABLE[index % 10]", "TABLE[index % 10] + 1", "np.add({x}, {y}, out={x})"]
        wild = ["shake({x})", "np_shake({x})", "tripled_shaken({x})", "list(random_ones({x}))[1]", "{x} * {d}"]
        wild += ["np.array([v + random.random() for v in {x}])", "rarely({x})", "np.random.permutation({x})"]
        wild += ["{x} if {d} < 0.5 else {y} * 2", "spread({x}, {d})", "counted({x})"]
        if self.own:
            plain += ["self.helper({x}, index)", "self.table[index]", "self.rows[index]['x']", "self.scale({x})"]
            plain += ["self.read(index)", "self.memo({x}, index)", "self.parts({x})[0]", "self.remembered(index)"]
            wild += ["self.tf({x})", "self.tf({x} + {d})", "self.kw(image={x})['image']", "self.noisy({x})"]
            wild += ["self.joint({x}, index)[0]", "self.fn({x})", "self.stage({x}, index=index)"]
        form = self.rng.choice(wild if self.chance(0.3) else plain)
        return form.format(x=x, y=y, n=n, d=self.draw())

    def tensor(self, live: list[str]) -> str:
        have = [x for x in live if x[0] == "t"]
        arrays = [x for x in live if x[0] == "a"]
        made = [f"torch.from_numpy({self.rng.choice(arrays)}.copy())"] if arrays else ["torch.arange(4.0) + index"]
        if not have or self.chance(0.3):
            return self.rng.choice(made)
        x = self.rng.choice(have)
        forms = [f"{x} * 2", f"{x}.exp().clamp(max=50)", f"{x} + torch.rand(4)", f"{x}.flip(0)", f"{x}.view(4)"]
        forms += [f"torch.stack([{x}, {x} + 1]).mean(0)", f"{x} + {self.number(live)}", f"double({x})"]
        forms += [f"self.seq({x})", f"self.seq({x} * 2)"] if self.own else []
        return self.rng.choice(forms)

    def condition(self, live: list[str]) -> str:
        forms = ["index % 2", "index % 3 == 1", "index == 7", "index > 5", "random.random() < 0.5", "COUNTER >= 0"]
        forms += [f"float({x}[0]) > 4" for x in live if x[0] in "at"]
        forms += ["self.flag", "self.mode == 'train'", "not self.flag and index % 2", "self.rng.random() < 0.3"]
        forms += ["(w := index % 4) > 1 and w < 3", "self.flag and np.random.rand() < 0.5"]
        return self.rng.choice([f for f in forms if self.own or "self" not in f])

    def returned(self, live: list[str]) -> str:
        some = [x for x in live if self.chance(0.6)] or live[-1:] or ["index"]
        forms = ["{s}", "({s}, index)", "{{'x': {f}, 'y': [{s}], 'name': 'n' + str(index)}}", "({s}, {f} * {d})"]
        forms += ["({f}, {d}, {s})", "dict(x={f}, z={d})", "[{s}]"]
        return self.rng.choice(forms).format(s=", ".join(some), f=some[0], d=self.draw())

    # -- statements

    def block(self, live: list[str], depth: int, most: int = 4) -> list[str]:
        out: list[str] = []
        for _ in range(self.rng.randint(1, most)):
            out += self.statement(live, depth)
        return out

    def statement(self, live: list[str], depth: int) -> list[str]:
        kinds = [self.assign] * 6 + [self.in_place] * 2 + [self.alias, self.state, self.other]
        kinds += [self.branch, self.branch, self.loop, self.guarded, self.context, self.leave] if depth else []
        return self.rng.choice(kinds)(live, depth)

    def assign(self, live: list[str], depth: int) -> list[str]:
        kind = self.one("a", "a", "t", "n")
        value = {"a": self.array, "t": self.tensor, "n": self.number}[kind](live)
        old = [x for x in live if x[0] == kind]
        target = self.rng.choice(old) if old and self.chance(0.4) else self.name(kind)
        if target not in live:
            live.append(target)
        return [f"{target} = {value}"]

    def in_place(self, live: list[str], depth: int) -> list[str]:
        arrays, tensors = ([x for x in live if x[0] == k] for k in "at")
        if arrays and self.chance(0.6):
            x = self.rng.choice(arrays)
            forms = ["{x} += 1", "{x} *= {n}", "{x}[0] = {n}", "{x} += {d}", "np.multiply({x}, 0.5, out={x})"]
            forms += ["{x}.sort()", "np.random.shuffle({x})", "{x}[index % 4] += {n}", "{x}[:2] = 1"]
        elif tensors:
            x = self.rng.choice(tensors)
            forms = ["{x}.mul_(2)", "{x} += {n}", "{x}[1] = {n}", "{x}.add_(torch.rand(4))", "{x}.normal_()"]
        else:
            return self.assign(live, depth)
        return [self.rng.choice(forms).format(x=x, n=self.number(live), d=self.draw())]

    def alias(self, live: list[str], depth: int) -> list[str]:
        old = [x for x in live if x[0] in "at"]
        if not old:
            return self.assign(live, depth)
        x = self.rng.choice(old)
        new = self.name(x[0])
        forms = ["{new} = {x}", "{new} = {x}[...]", "{new}, _ = {x}, index", "*_, {new} = [index, {x}]"]
        forms += ["box = [{x}]\n{new} = box[0]", "{new} = ({x}, index)[0]", "pair = {{'v': {x}}}\n{new} = pair['v']"]
        live.append(new)
        return self.rng.choice(forms).format(new=new, x=x).split("\n")

    def state(self, live: list[str], depth: int) -> list[str]:
        if not self.own:
            return self.assign(live, depth)
        new, x = self.name("a"), self.rng.choice([x for x in live if x[0] == "a"] or ["load(index)"])
        forms = ["self.count += 1", "self.seen.append(index)", "self.last = {x}", "self.kept[index] = {x}"]
        forms += ["began = time.time()\nself.count += time.time() >= began", "self.sums[index % 3] += self.gain"] * 2
        forms += ["if self.flag and index > 3:\n    self.count += index", "{new} = {x} * (self.sums[0] % 2 + 1)"]
        forms += ["if self.handle is None:\n    self.handle = Resource(2)\n{new} = self.handle.read({x})"]
        forms += ["if not hasattr(self, '_table'):\n    self._table = np.arange(4.0)\n{new} = {x} + self._table"]
        forms += ["self.count += 1\n{new} = {x} + self.count % 3", "{new} = {x} + len(self.seen) % 2"]
        forms += ["first = index not in self.visited\nself.visited.add(index)\n{new} = {x} + first"]
        forms += ["self.table[index] *= 1.01\n{new} = self.table[index]", "{new} = self.kept.setdefault(index, {x})"]
        forms += ["{new} = counted({x})", "{new} = {x} + next(self.turns)"]
        form = self.rng.choice(forms)
        if "{new}" in form:
            live.append(new)
        return form.format(new=new, x=x).split("\n")

    def other(self, live: list[str], depth: int) -> list[str]:
        new, x = self.name("a"), self.rng.choice([x for x in live if x[0] == "a"] or ["load(index)"])
        y = f"{new}_inner"
        forms = [
            "def {y}(v):\n    return v + {n}\n{new} = {y}({x})",
            "def {y}(v, k={n}):\n    return v * k + random.random()\n{new} = {y}({x})",
            "total = 0\ndef {y}(v):\n    nonlocal total\n    total += 1\n    return v + total\n{new} = {y}({x})",
            "if ({new} := {x} + 1)[0] > 2:\n    {new} = {new} * 2",
            "{new} = sum(v for v in [{x}, {x} * 2])",
            "gone = {x}\n{new} = gone + 1\ndel gone",
            "import math\n{new} = {x} * math.pi",
            "{new} = {x} + (0 < index < {n})",
            "{new} = {x} + len(f'{{index}}-{{{d}:.3f}}')",
            "{new} = {x} + (index and {d} or 2)",
            "local = np.random.default_rng(index)\n{new} = {x} + local.random()",
            "{new} = {x} * 2 if index % 3 else {x} + {d}",
            "try:\n    {new} = sometimes_fails({x}, index)\nexcept ValueError:\n    {new} = {x} * {n}",
            "try:\n    {new} = sometimes_fails({x}, index)\nexcept:\n    {new} = {x} - 1",
            "assert index >= 0, 'negative'\n{new} = {x}",
            "{new}, other = {x} + {n}, {d}\n{new} = {new} + other",
            "values = {{k: {x} + k for k in range(2)}}\n{new} = values[index % 2]",
            "match = [v for v in {x}]\nrandom.shuffle(match)\n{new} = np.array(match)",
        ]
        live.append(new)
        return self.rng.choice(forms).format(new=new, x=x, y=y, n=self.number(live[:-1]), d=self.draw()).split("\n")

    def branch(self, live: list[str], depth: int) -> list[str]:
        one, two = list(live), list(live)
        out = [f"if {self.condition(live)}:", *indented(self.block(one, depth - 1, 3))]
        if self.chance(0.5):
            out += ["else:", *indented(self.block(two, depth - 1, 3))]
            live += [x for x in one if x in two and x not in live]
        return out

    def loop(self, live: list[str], depth: int) -> list[str]:
        arrays = [x for x in live if x[0] == "a"]
        if self.own and arrays and self.chance(0.3):
            x, y = self.rng.choice(arrays), self.rng.choice(arrays)
            return (
                self.one(
                    "for step in self.steps:\n    {x} = step({x})",
                    "for step in [*self.steps, self.fn]:\n    {x} = step({x})",
                    "for step in self.pairs:\n    {x}, {y} = step({x}, {y})",
                    "for step in self.steps:\n    {x} = step({y})",
                    "for step in self.steps:\n    {x} = step({x})\n{x} = step({x})",
                )
                .format(x=x, y=y)
                .split("\n")
            )
        inside = list(live)
        k = self.name("n")
        form = self.one("for {k} in range({m}):", "for {k}, _ in enumerate(self.names):", "for {k} in (1, index):")
        if not self.own:
            form = "for {k} in range({m}):"
        out = [form.format(k=k, m=self.rng.randint(1, 3))]
        inside.append(k)
        out += indented(self.block(inside, 0, 2))
        if self.chance(0.3):
            out += indented([self.one("if index % 4 == 2:\n    break", "if random.random() < 0.3:\n    continue")])
        return [line for text in out for line in text.split("\n")]

    def guarded(self, live: list[str], depth: int) -> list[str]:
        inside, other = list(live), list(live)
        body = self.block(inside, depth - 1, 3)
        if self.chance(0.5):
            at = self.rng.randrange(len(body) + 1)
            while at < len(body) and (body[at].startswith((" ", "else", "except", "finally"))):
                at += 1
            body.insert(
                at, self.one("if index % 4 == 1: raise KeyError(index)", "if random.random() < 0.3: raise KeyError")
            )
        handler = self.one("except KeyError:", "except Exception as e:", "except:", "except (KeyError, ValueError):")
        out = ["try:", *indented(body), handler, *indented(self.block(other, 0, 2))]
        if self.chance(0.2):
            out += ["else:", *indented(self.block(list(live), 0, 1))]
        if self.chance(0.2):
            out += ["finally:", *indented(self.block(list(live), 0, 1))]
        return out

    def context(self, live: list[str], depth: int) -> list[str]:
        forms = ["with LOCK:", "with contextlib.suppress(ZeroDivisionError):", "with torch.no_grad():"]
        forms += [
            "with Resource(3) as r:",
            "with scaled(2) as n0:",
            "with seeded(index):",
            "with np.errstate(all='ignore'):",
        ]
        form = self.rng.choice(forms)
        if form == "with LOCK:":
            depth = 1  # not twice
        inside = list(live)
        body = self.block(inside, 0 if form == "with LOCK:" else depth - 1, 3)
        if " r:" in form:
            new = self.name("a")
            body.append(f"{new} = r.read(load(index))")
            inside.append(new)
        if "suppress" not in form:
            live += [x for x in inside if x not in live]
        return [form, *indented(body)]

    def leave(self, live: list[str], depth: int) -> list[str]:
        return [f"if {self.condition(live)}:", f"    return {self.returned(live)}"]


def indented(lines: list[str]) -> list[str]:
    return [line for text in lines for line in textwrap.indent(text, "    ").split("\n")]


def _items(rng: random.Random, pool: tuple[str, ...]) -> str:
    return ", ".join(rng.choice(pool) for _ in range(rng.randint(1, 4)))


def source_of(rng: random.Random) -> str:
    """A module that defines a dataset."""
    based = rng.random() < 0.3
    tensors = rng.random() < 0.3
    lines = [HEADER, ""]
    lines += ["class Base(Dataset):", *indented(_methods(rng)), ""]
    body = Writer(rng)
    live: list[str] = []
    out = []
    if based:
        base = Writer(rng)
        known: list[str] = []
        inside = ["a1 = load(index)"]
        base.n = 1
        known.append("a1")
        inside += base.block(known, 1, 3)
        inside.append(f"return {rng.choice(known)}")
        lines += ["", *indented(["def __getitem__(self, index):", *indented(inside)]), ""]
        out.append("a0 = np.asarray(super().__getitem__(index), dtype=float)")
        live.append("a0")
        if rng.random() < 0.7:
            out.append("a0 = a0 * np.ones(4)")
    if not live:
        out.append(
            f"a0 = {rng.choice(['load(index)', 'self.table[index]', 'self.read(index)', 'self.helper(load(index), index)'])}"
        )
        live.append("a0")
    if tensors:
        out.append("t0 = torch.from_numpy(a0 + 1)")
        live.append("t0")
    out += body.block(live, 2, 6)
    if rng.random() < 0.5:
        out.append(body.rng.choice(["a0 = self.tf(a0)", "a0 = self.kw(image=a0)['image']", "a0 = shake(a0)"]))
        out += body.block(live, 1, 2)
    out.append(f"return {body.returned(live)}")
    decorator = rng.choice([[], [], [], [], ["@shown"]])
    lines += ["", "class Data(Base):", *indented([*decorator, "def __getitem__(self, index):", *indented(out)]), ""]
    lines += ["def build():", *indented(_build(rng)), ""]
    lines += ["def change(data, epoch):", *indented(_change(rng)), ""]
    return "\n".join(lines)


def _methods(rng: random.Random) -> list[str]:
    out = ["def __init__(self, n=12):"]
    out += indented(
        [
            "self.n, self.gain, self.flag, self.mode = n, 1.5, True, 'train'",
            "self.__secret = self._Data__secret = 2.5",
            "self.names, self.count, self.seen, self.kept, self.visited = ['a', 'bcd', 'ef'], 0, [], {}, set()",
            "self.sums = [0, 0, 0]",
            "self.table = np.arange(4.0 * n).reshape(n, 4)",
            "self.rows = [{'x': np.arange(4.0) + k} for k in range(n)]",
            "self.handle = self.last = None",
            "import itertools",
            "self.turns = itertools.cycle([0.0, 1.0, 2.0])",
            "self.rng, self.np_rng = random.Random(3), np.random.default_rng(4)",
            "self.torch_rng = torch.Generator().manual_seed(5)",
            f"self.tf = {rng.choice(['Compose([{}])', 'Chain({})', 'Gate([{}], 0.5)'])}".format(_items(rng, ITEMS)),
            f"self.kw = Keyword([{_items(rng, ITEMS)}])",
            f"self.seq = nn.Sequential({_items(rng, LAYERS)})",
            f"self.fn = {rng.choice(ITEMS)}",
            f"self.steps = [{_items(rng, ITEMS)}]",
            f"self.pairs = [Both({_items(rng, ITEMS)}) for _ in range(2)]",
        ]
    )
    out += ["def __len__(self):", "    return self.n"]
    out += ["def draw(self):", "    return random.random() + self.np_rng.random()"]
    out += ["def scale(self, x):", "    return x * self.gain"]
    out += ["def noisy(self, x):", "    x = np.sqrt(x * x + 1)", "    return x + np.random.rand(4)"]
    out += ["def parts(self, x):", "    return x, x + 1"]
    out += ["def memo(self, x, index):", "    if index not in self.kept:", "        self.kept[index] = x * 2"]
    out += ["    return self.kept[index]"]
    out += ["@functools.lru_cache(None)", "def remembered(self, index):", "    return load(index) * 2"]
    for name, params in (
        ("helper", "self, x, index"),
        ("read", "self, index"),
        ("joint", "self, x, index"),
        ("stage", "self, x, *, index=0"),
    ):
        writer = Writer(rng)
        writer.n = 1
        live = ["a1"]
        inside = ["a1 = load(index)" if name == "read" else "a1 = x", *_safe(writer.block(live, 1, 3), name)]
        last = rng.choice([x for x in live if x[0] == "a"])
        inside.append(f"return ({last}, index)" if name == "joint" else f"return {last}")
        out += [f"def {name}({params}):", *indented(inside)]
    return out


def _safe(lines: list[str], own: str) -> list[str]:
    """Helpers call no helpers that were not written before them, and return arrays."""
    order = ["helper", "read", "joint", "stage"]
    later = order[order.index(own) :]
    kept = []
    for line in lines:
        for name in later:
            line = line.replace(f"self.{name}(", {"helper": "spread(", "joint": "self.parts("}.get(name, "self.scale("))
        line = line.replace("self.scale(index)", "load(index)").replace(", index=index)", ")")
        if line.lstrip().startswith("return") and "random" not in line and "_inner" not in line:
            line = line[: len(line) - len(line.lstrip())] + (
                "return (load(index), 1)" if own == "joint" else "return load(index)"
            )
        kept.append(line)
    return kept


def _build(rng: random.Random) -> list[str]:
    forms = ["Data()"] * 6 + [
        "Subset(Data(), [1, 3, 5, 7, 9, 11, 0, 2])",
        "ConcatDataset([Data(6), Data(6)])",
        "Around(Data())",
    ]
    forms += [
        "Twice(Data())",
        "Subset(Around(Data()), range(2, 10))",
        "Mixed(Data())",
        "Around(Subset(Data(), range(9)))",
    ]
    return [f"return {rng.choice(forms)}"]


def _change(rng: random.Random) -> list[str]:
    find = [
        "while not isinstance(data, Data):",
        "    data = getattr(data, 'inner', None) or getattr(data, 'dataset', None) or data.datasets[0]",
    ]
    forms = ["pass"] * 5 + [
        "data.gain = 2.0 + epoch",
        "data.flag = epoch % 2 == 0",
        "data.mode = 'late'",
        "data.table[3] += 1",
    ]
    forms += [
        "if epoch == 2: data.names = ['abc', 'd', '']",
        "data.rows[0] = {'x': np.ones(4)}",
        "global COUNTER; COUNTER = epoch",
    ]
    return [*find, rng.choice(forms)]
