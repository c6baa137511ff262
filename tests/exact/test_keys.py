"""What changes the key of a cache between two runs, one thing at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
# Each is a module ``data`` with a dataset ``ds``, before and after an edit. ``util/__init__.py`` lies beside it.
CHANGES = {
    "a star of an argument": ("def f(*a): return len(a)", "def f(a): return len(a)"),
    "from try to else": (
        "def f(a):\n try:\n  b = 1 / a\n  c = [][0]\n except ZeroDivisionError:\n  return 0\n return 1",
        "def f(a):\n try:\n  b = 1 / a\n except ZeroDivisionError:\n  return 0\n else:\n  c = [][0]\n return 1",
    ),
    "the end of a long pattern": (
        "import re\nP = re.compile('|'.join(map(str, range(500))) + '|a')\ndef f(a): return P.match(a)",
        "import re\nP = re.compile('|'.join(map(str, range(500))) + '|b')\ndef f(a): return P.match(a)",
    ),
    "the end of a long record": (
        "import numpy as np\nR = np.zeros(1, [('a', 'i4', (2048,))])[0]\ndef f(a): return R",
        "import numpy as np\nR = np.zeros(1, [('a', 'i4', (2048,))])[0]\nR['a'][1000] = 1\ndef f(a): return R",
    ),
    "a relative import": (
        "import util\ndef f(a):\n from .util import g\n return g(a)",
        "import util\ndef f(a):\n from .util import h\n return h(a)",
    ),
    "a module in a dict": (
        "import types\nM = types.ModuleType('m'); M.k = 1\nALL = {'a': M}\ndef f(a): return ALL['a'].k",
        "import types\nM = types.ModuleType('m'); M.k = 2\nALL = {'a': M}\ndef f(a): return ALL['a'].k",
    ),
    "a module found by its name": (
        "import sys, types\nM = sys.modules['m'] = types.ModuleType('m'); M.k = 1\ndef f(a): return sys.modules[a].k",
        "import sys, types\nM = sys.modules['m'] = types.ModuleType('m'); M.k = 2\ndef f(a): return sys.modules[a].k",
    ),
    "the second of two modules with one name": (
        "import types\nA = types.ModuleType('m'); A.k = 1; B = types.ModuleType('m'); B.k = 1\ndef f(a): return A.k + B.k",
        "import types\nA = types.ModuleType('m'); A.k = 1; B = types.ModuleType('m'); B.k = 2\ndef f(a): return A.k + B.k",
    ),
    "the second of two classes with one name": (
        "def make(k):\n class C:\n  def g(self): return k\n return C\nA, B = make(1), make(1)\ndef f(a): return A().g(), B().g()",
        "def make(k):\n class C:\n  def g(self): return k\n return C\nA, B = make(1), make(2)\ndef f(a): return A().g(), B().g()",
    ),
    "the order of a set of numbers": ("S = set([0, 8, 1])\ndef f(a): return list(S)", "S = set([8, 0, 1])\ndef f(a): return list(S)"),
    "a partial put into a library": (
        "import numpy as np, functools\nnp.my = functools.partial(max, 1)\ndef f(a): return np.my(a)",
        "import numpy as np, functools\nnp.my = functools.partial(max, 2)\ndef f(a): return np.my(a)",
    ),
    "an object put into a library": (
        "import numpy as np\nclass C:\n k = 1\nnp.my = C()\ndef f(a): return np.my.k",
        "import numpy as np\nclass C:\n k = 2\nnp.my = C()\ndef f(a): return np.my.k",
    ),
    "a docstring that is read": (
        "class C:\n 'one'\nc = C()\ndef f(a): return c.__doc__",
        "class C:\n 'two'\nc = C()\ndef f(a): return c.__doc__",
    ),
}  # fmt: skip
ENVIRONMENT = {
    "expandvars": "import os\ndef f(a): return os.path.expandvars('$X')",
    "expanduser": "import os\ndef f(a): return os.path.expanduser('~')",
    "another name of getenv": "from os import getenv as ge\ndef f(a): return ge('X')",
    "another name of environ": "import os\nE = os.environ\ndef f(a): return E['X']",
}
SAME = {
    "a comment and lines": ("def f(a): return a", "# another\n\n\ndef f(a):\n    # one more\n    return a"),
    "a function that is not called": ("def f(a): return a\ndef g(a): return 1", "def f(a): return a\ndef g(a): return 2"),
    "a set of words": ("S = {'a', 'b', 'c'}\ndef f(a): return a in S", "S = {'c', 'b', 'a'}\ndef f(a): return a in S"),
    "a loop's variable of a module held": (
        "import types\nM = types.ModuleType('m'); M.k = 1; M.step = 1\nALL = [M]\ndef f(a): return ALL[0].k",
        "import types\nM = types.ModuleType('m'); M.k = 1; M.step = 2\nALL = [M]\ndef f(a): return ALL[0].k",
    ),
}  # fmt: skip
KEYS = """
import importlib, json, shutil, sys
from pathlib import Path
from stoker.staging.inputs import Inputs
from stoker.staging.users_code import names_in

folder = Path(sys.argv[1])
sys.path.insert(0, str(folder))
out = {}
for name, source in json.load(sys.stdin).items():
    package = folder / "pack"
    shutil.rmtree(package, ignore_errors=True)
    (package / "util").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "util" / "__init__.py").write_text("def g(a): return 1\\ndef h(a): return 2\\n")
    (package / "data.py").write_text(source.replace("import util", "from . import util"))
    importlib.invalidate_caches()
    f = importlib.import_module("pack.data").f
    names = set(names_in(f.__code__)[1]) | {"g"}
    found = {repr(Inputs(f, names=names, across_runs=True).keys()) for _ in range(2)}
    assert len(found) == 1, name
    out[name] = found.pop()
    for module in [m for m in sys.modules if m.partition(".")[0] == "pack"]:
        del sys.modules[module]
print(json.dumps(out))
"""


def keys(folder: Path, sources: dict[str, str], **env: str) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-B", "-c", KEYS, str(folder)],
        input=json.dumps(sources),
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | env,
    )
    assert not done.returncode, done.stderr
    return dict(json.loads(done.stdout))


def test_what_counts_and_what_does_not(tmp_path: Path) -> None:
    edits = CHANGES | SAME
    before = keys(tmp_path / "a", {name: edit[0] for name, edit in edits.items()}, PYTHONHASHSEED="1")
    after = keys(tmp_path / "a", {name: edit[1] for name, edit in edits.items()}, PYTHONHASHSEED="1")
    assert {name for name in edits if before[name] != after[name]} == CHANGES.keys()


def test_the_environment_counts_under_whatever_name(tmp_path: Path) -> None:
    sources = ENVIRONMENT | {name: edit[0] for name, edit in SAME.items()}
    before = keys(tmp_path / "a", sources, X="1", HOME="/a")
    after = keys(tmp_path / "a", sources, X="2", HOME="/b")
    assert {name for name in sources if before[name] != after[name]} == ENVIRONMENT.keys()
