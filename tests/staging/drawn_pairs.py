"""Python source of datasets whose samples draw first and load afterwards, drawn at random.

``source_of(random.Random(7))`` is a module's text, as in ``drawn``. Arrays are loaded by small values and go through
calls; between these, variables are assigned anew, written into, shared and captured, and the dataset changes.
"""

from __future__ import annotations

import random

from .drawn import HEADER, indented

LOADS = ("load({k})", "self.read({k})", "TABLE[{k} % 10]", "TABLE[{k} % 10] + 1", "np.sqrt(load({k}))")
LOADS += ("self.table[{k}].copy()",)
LOADS += ("load(self.order[random.randrange(self.n)])", "double(load(random.choice(self.order)))")
LOADS += ("self.rows[{k}]['x']", "self.scaled({k})", "pairs[{k}][0].copy()", "self.remembered({k})")
LOADS += ("load(row['k'])", "self.read(row['k']) + row['x']", "np.sqrt(load(point.k))", "double(row['x'])")
LOADS += ("np.add(load(point.k), load(row['k']))", "self.scaled(k=row['k'])", "load(int(load(row['k'])[0] % self.n))")
CALLS = ("double({x})", "np.sin({x})", "{x}.copy()", "write_in({x})", "np.ascontiguousarray({x}[::-1])", "tripled({x})")
CALLS += ("self.tf({x})", "self.fixed({x})", "shake({x})", "Scale(2)({x})", "np.clip({x}, 0, {k})", "InPlace()({x})")
CALLS += ("self.seen_by({x})", "np.add({x}, 1, out={x})", "self.gained({x})", "counted({x})", "rarely({x})")
CALLS += ("spread({x}, double({y}))", "self.tf(double({x}))", "self.rec({x}, {k})", "{x}.astype(np.float64)")
CALLS += ("self.tf(load({k}))", "np.where({x} > 3, {x}, {y})", "self.tf({x}) if self.flag else {x}", "list([{x}])[0]")
CHANGES = (
    "row = self.rows[{k}]",
    "row = random.choice(self.rows)",
    "row = dict(row, k={k})",
    "row = dict(row)\nrow['k'] = {k}",
    "point = Point({k})",
    "point.k = {k}",
    "row['x'] = row['x'] + {x}[0]",
    "self.gain = {k} + 1",
    "self.count += 1",
    "self.kept[{k}] = {x}",
    "self.last = {x}",
    "self.flag = not self.flag",
)
WRITES = (
    "{x} += 1",
    "{x}[0] = {k}",
    "{x} *= 1.5",
    "np.random.shuffle({x})",
    "{x}.sort()",
    "np.multiply({x}, 2, out={x})",
)
ITEMS = ("double", "Scale(3)", "InPlace()", "shake", "Jitter(0.5)", "rarely", "np_shake", "Counts()", "Owns(3)")


class Writer:
    """Writes the body of ``__getitem__``."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.n = 0
        self.numbers = ["index", "j", "k"]
        self.arrays: list[str] = []

    def form(self, forms: tuple[str, ...]) -> str:
        x, y = (self.rng.choice(self.arrays or ["load(j)"]) for _ in range(2))
        return self.rng.choice(forms).format(x=x, y=y, k=self.rng.choice(self.numbers))

    def target(self) -> str:
        if self.arrays and self.rng.random() < 0.5:
            return self.rng.choice(self.arrays)
        self.n += 1
        return f"x{self.n}"

    def assign(self, forms: tuple[str, ...]) -> list[str]:
        value, target = self.form(forms), self.target()
        if target not in self.arrays:
            self.arrays.append(target)
        return [f"{target} = {value}"]

    def statement(self, depth: int) -> list[str]:
        roll = self.rng.random()
        if roll < 0.25 or not self.arrays:
            return self.assign(LOADS)
        if roll < 0.62:
            return self.assign(CALLS)
        if roll < 0.68:
            return [self.form(WRITES)]
        if roll < 0.72:
            return self.form(CHANGES).split("\n")
        if roll < 0.76:
            return [
                f"{self.rng.choice(self.numbers[1:])} = {self.form(('random.randrange(self.n)', '(index + 1) % self.n', 'j'))}"
            ]
        if roll < 0.8:
            return self.assign(("{x}", "{x}.view()", "[{x}, {y}][1]", "({x}, index)[0]"))
        if roll < 0.86 or not depth:
            return self.rare()
        return self.block(depth - 1)

    def rare(self) -> list[str]:
        x, k = self.rng.choice(self.arrays), self.rng.choice(self.numbers)
        forms = [
            f"n, = {x}.shape\n{x} = {x} + n",
            f"total = sum(v.sum() for v in [double({x}), {x}])\n{x} = {x} + total",
        ]
        forms += [f"later = lambda: double({x})\n{x} = load({k})\n{x} = {x} + later()", f"{x}, other = load({k}), {x}"]
        forms += [
            f"with Resource(2) as r:\n    {x} = r.read(load({k}))",
            f"with scaled({k}) as s:\n    {x} = load({k}) * s",
        ]
        forms += [
            f"with LOCK:\n    {x} = double(load({k}))",
            f"def inner(v):\n    return v + {x}\n{x} = inner(double({x}))",
        ]
        forms += [
            f"if len({x}) > 3 and {x}[0] > 2:\n    {x} = self.tf({x})",
            f"gone = load({k})\n{x} = double(gone)\ndel gone",
        ]
        return self.rng.choice(forms).split("\n")

    def block(self, depth: int) -> list[str]:
        known = list(self.arrays)
        inside = [line for _ in range(self.rng.randint(1, 3)) for line in self.statement(depth)]
        self.arrays = known
        heads = [
            "if self.flag:",
            "if random.random() < 0.5:",
            "if index % 2:",
            "if index == 7:",
            "for j in (k, index):",
        ]
        heads += ["while True:", "try:", "with LOCK:", "with contextlib.suppress(ValueError):", "with seeded(index):"]
        head = self.rng.choice(heads)
        if head.startswith(("for", "while", "try", "with contextlib")) and self.rng.random() < 0.7:
            statement = "break" if head.startswith(("for", "while")) else "raise ValueError"
            inside += [f"if index == {self.rng.choice((7, 'j'))}:", f"    {statement}", *self.statement(0)]
        if head == "while True:":
            inside.append("break")
        end = []
        if head == "try:":
            end = ["except ValueError:", f"    {self.rng.choice(known)} = {self.form(('load(0)', *CALLS))}"]
            end += ["finally:", f"    {self.rng.choice(known)} = {self.form(CALLS)}"] if self.rng.random() < 0.3 else []
        return [head, *indented(inside), *end]


def source_of(rng: random.Random) -> str:
    """The text of a module with ``build()`` and ``change(data, epoch)``."""
    writer = Writer(rng)
    body = ["j = random.randrange(self.n)", "k = (index * 3 + 1) % self.n", "pairs = self.pairs"]
    body += ["row, point = self.rows[j], Point(k)"]
    for _ in range(rng.randint(3, 10)):
        body += writer.statement(2)
    shown = rng.sample(writer.arrays, k=rng.randint(1, len(writer.arrays)))
    body.append(f"return [{', '.join(f'np.array({x})' for x in shown)}], j")
    items, fixed = (", ".join(rng.choice(ITEMS[:n]) for _ in range(rng.randint(1, 4))) for n in (len(ITEMS), 3))
    container = rng.choice(["Compose([{}])", "Chain({})", "Gate([{}], 0.5)"])
    changes = ["pass", "pass", "data.gain = epoch", "data.table[3] += 1", "data.flag = epoch % 2 == 0", "TABLE[3] += 1"]
    changes += ["data.fixed.transforms[0] = Scale(epoch + 2)", "data.tf = Compose([double, Scale(epoch + 2), shake])"]
    changes += ["data.rows[3]['x'] += 1", "data.order.reverse()", "data.fixed.transforms.append(double)"]
    change = rng.choice(changes)
    methods = ["def __init__(self, n=12):"]
    methods += indented(
        [
            "self.n, self.gain, self.flag, self.count, self.kept, self.last = n, 1.5, True, 0, {}, None",
            "self.table = np.arange(4.0 * n).reshape(n, 4)",
            "self.rows = [{'x': np.arange(4.0) + k, 'k': k} for k in range(n)]",
            "self.pairs = [(np.arange(4.0) * k, k) for k in range(n)]",
            "self.order = list(range(n))[::-1]",
            f"self.tf, self.fixed = {container.format(items)}, Compose([{fixed}])",
        ]
    )
    methods += ["def __len__(self):", "    return self.n"]
    methods += [
        "def read(self, k):",
        "    a = load(k)",
        "    a = self.tf(a)" if rng.random() < 0.5 else "    a = a * 2",
    ]
    methods += ["    return a"]
    methods += [
        "def scaled(self, k):",
        "    return load(k) * self.gain",
        "def gained(self, x):",
        "    return x * self.gain",
    ]
    methods += ["def seen_by(self, x):", "    self.last = x", "    return x + 1"]
    methods += ["def rec(self, x, k):", "    y = load(k)", "    return self.tf(y) + x"]
    methods += ["@functools.lru_cache(None)", "def remembered(self, k):", "    return load(k) * 2"]
    point = ["class Point:", "    def __init__(self, k):", "        self.k = k"]
    lines = [HEADER, *point, "class Data(Dataset):", *indented(methods)]
    lines += indented(["def __getitem__(self, index):", *indented(body)])
    lines += ["def build():", "    return Data()", "def change(data, epoch):", f"    {change}", ""]
    return "\n".join(lines)
