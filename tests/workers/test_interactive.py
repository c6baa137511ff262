"""Classes that no file has: what is typed into a notebook or an interpreter, under each start method."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="stoker's own workers are on Linux")
TYPED = """
import sys
import stoker
class Own(list):
    word = "__main__"
data = {}
context = sys.argv[1]
try:
    print([x.tolist() for x in stoker.DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context=context)])
except stoker.StokerError as e:
    print(type(e).__name__, e)
"""


def typed(data: str, context: str) -> str:
    line = [sys.executable, "-c", TYPED.format(data), context]
    p = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert p.returncode == 0, p.stderr
    return p.stdout.strip()


@pytest.mark.slow
def test_a_class_that_no_new_process_finds_is_refused() -> None:
    said = typed("Own(range(4))", "spawn")
    assert said.startswith("UsageError Own was defined in a notebook or interactive interpreter")
    assert 'Use multiprocessing_context="fork"' in said


@pytest.mark.slow
def test_under_fork_it_needs_no_name() -> None:
    assert typed("Own(range(4))", "fork") == "[[0, 1], [2, 3]]"


@pytest.mark.slow
def test_the_word_alone_is_no_class() -> None:
    assert typed("[len(x) for x in ['__main__', 'Own', 'a', 'b']]", "spawn") == "[[8, 3], [1, 1]]"
