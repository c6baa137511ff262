"""The magics in a kernel of Jupyter's and in IPython, and the example notebooks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .harness import HERE, SOURCE

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="loaders are watched on Linux only"),
    pytest.mark.scripts,
    pytest.mark.timeout(300),
]
NOTEBOOKS = HERE.parents[1] / "examples" / "notebooks"
DATA = """\
import time
import torch
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        time.sleep(0.003)
        return torch.full((4,), float(i))
"""


def execute(cells: list[str] | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool = False) -> Any:
    """The notebook after a kernel has run it."""
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    if isinstance(cells, Path):
        notebook = nbformat.read(cells, as_version=4)
    else:
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = NotebookClient(notebook, timeout=200, kernel_name="python3", allow_errors=fails)
    client.create_kernel_manager().kernel_spec_manager.ensure_native_kernel = True
    return client.execute(cwd=str(tmp_path))


def html(cell: Any) -> list[str]:
    """What a cell shows as HTML."""
    return [o.data["text/html"] for o in cell.outputs if o.output_type == "display_data" and "text/html" in o.data]


def values(cell: Any) -> list[str]:
    return [o.data["text/plain"] for o in cell.outputs if o.output_type == "execute_result"]


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_example(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = execute(path, tmp_path, monkeypatch)
    watched = [cell for cell in done.cells if cell.source.startswith("%%stoker")]
    for cell in watched:
        (report,) = html(cell)
        assert "<table" in report
        assert len(values(cell)) == 1, "the value of the last line is the cell's"
    if path.stem.startswith("02"):
        assert ">after<" in html(watched[-1])[0]
        assert "cacheable_prefix</b>, applied" in html(watched[-1])[0]


def test_a_cell_is_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = "loader = DataLoader(Slow(), batch_size=4, num_workers=1)\nfor x in loader:\n    time.sleep(0.01)\n"
    cells = ["%load_ext stoker", DATA, "%%stoker\n" + loop + "print('done')\n1 + 1", "_ + 1", "%%stoker\n1;"]
    *_, cell, after, quiet = execute(cells, tmp_path, monkeypatch).cells
    (report,) = html(cell)
    assert "In[3]:1" in report
    assert "ipykernel" not in report
    assert "Slow.__getitem__" not in report or "In[2]:" in report
    assert [o.text for o in cell.outputs if o.output_type == "stream"] == ["done\n"]
    assert values(cell) == ["2"]
    assert values(after) == ["3"]
    assert not values(quiet)
    assert "no DataLoader was iterated" in html(quiet)[0]


def test_the_line_below_a_cell_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the line has said what the loop does, the cell goes on."""
    keep = (
        "import IPython.display as d\nseen = []\n"
        "real = d.DisplayHandle.update\n"
        "d.DisplayHandle.update = lambda self, x, **kw: (seen.append(x._repr_html_()), real(self, x, **kw))"
    )
    loop = "%%stoker\nwhile not any('waits' in text for text in seen):\n    for x in DataLoader(Slow(), batch_size=4): pass"
    *_, cell, last = execute(
        ["%load_ext stoker", DATA, keep, loop, "print(*seen, sep='\\n')"], tmp_path, monkeypatch
    ).cells
    assert "input-bound" in html(cell)[0]
    text = re.sub("<[^>]*>", "", last.outputs[0].text)
    assert re.search(
        r"^stoker: [\d.]+ m?s, In\[4\]:2: batch \d+, waits \d+% of its time, \d+ samples/s$", text, re.M
    ), text


def test_what_a_cell_raises_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = ["%load_ext stoker", DATA, "%%stoker\nfor x in DataLoader(Slow()):\n    1 / 0", "%%stoker nonsense\n1"]
    cells += ["%%stoker\nif", "%stoker_apply perhaps", "%%stoker\nlist(DataLoader(Slow()))\nNone"]
    *_, cell, wrong, syntax, perhaps, well = execute(cells, tmp_path, monkeypatch, fails=True).cells
    (error,) = [o for o in cell.outputs if o.output_type == "error"]
    assert error.ename == "ZeroDivisionError"
    assert not [line for line in error.traceback if "notebook.py" in line]
    assert html(cell)
    for broken, name in ((wrong, "UsageError"), (syntax, "SyntaxError"), (perhaps, "UsageError")):
        assert [o.ename for o in broken.outputs if o.output_type == "error"] == [name]
    assert "input-bound" in html(well)[0], "the cells that failed have left nothing behind"


def test_apply_on_and_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = "%%stoker\nloader = DataLoader(Slow(), batch_size=4, num_workers=1)\nit = iter(loader)\nx = list(it)\ntype(it).__module__"
    cells = [
        "%load_ext stoker",
        DATA,
        count,
        "%stoker_apply on",
        count,
        "%stoker_apply off",
        count,
        "%unload_ext stoker",
    ]
    _, _, before, _, on, _, off, _ = execute(cells, tmp_path, monkeypatch).cells
    assert values(before) == values(off) == ["'torch.utils.data.dataloader'"]
    assert values(on)[0].startswith("'stoker.")
    assert "Try <code>%stoker_apply on</code>" in html(before)[0]
    assert ">after<" in html(on)[0]
    assert ">after<" not in html(off)[0]


def test_classes_of_a_cell_under_fork_and_spawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = (
        "import stoker\nlen(list(stoker.DataLoader(Slow(), batch_size=4, num_workers=1, multiprocessing_context={!r})))"
    )
    *_, fork, spawn = execute(
        [DATA, make.format("fork"), make.format("spawn")], tmp_path, monkeypatch, fails=True
    ).cells
    assert values(fork) == ["16"]
    (error,) = [o for o in spawn.outputs if o.output_type == "error"]
    assert error.ename == "UsageError"
    assert error.evalue.startswith("Slow was defined in a notebook")
    assert 'multiprocessing_context="fork"' in error.evalue


SHELL = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance(colors="NoColor")
for cell in ["%load_ext stoker", open("data.py").read(),
             "%%stoker\\nloader = DataLoader(Slow(), batch_size=4)\\nfor x in loader: pass\\nlen(loader)",
             "%stoker_apply on", "list(loader)", "%unload_ext stoker"]:
    shell.run_cell(cell, store_history=True).raise_error()
"""


def test_ipython_without_a_notebook(tmp_path: Path) -> None:
    """What is typed into IPython has no file at all; the report is text, and fits 40 columns."""
    (tmp_path / "data.py").write_text(DATA)
    known = {"PYTHONPATH": str(SOURCE), "IPYTHONDIR": str(tmp_path), "HOME": str(tmp_path), "COLUMNS": "40"}
    p = subprocess.run(
        [sys.executable, "-c", SHELL], capture_output=True, text=True, timeout=120, cwd=tmp_path, env=os.environ | known
    )
    assert p.returncode == 0, p.stdout + p.stderr
    assert "stoker: input-bound" in p.stdout
    assert "In[3]:1: 0 workers" in p.stdout
    assert "Out[3]: 16" in p.stdout
    assert "ipython-input" not in p.stdout
    lines = p.stdout.partition("Out[3]")[0].splitlines()
    assert all(len(line) <= 40 for line in lines if not line.startswith("verdict")), p.stdout
