"""Memory that was freed is taken again without page faults."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")

PAGE_FAULTS = """
import resource, sys
from stoker.core.allocator import keep_freed_memory

print(keep_freed_memory() if sys.argv[1] == "keep" else False)
for epoch in range(12):
    if epoch == 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    samples = [bytearray(200_000) for _ in range(64)]
    del samples
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


PAGES = 10 * 64 * 200_000 // 4096  # without it each is taken again, unless a block in use happens to lie behind them


def faults(argument: str, **variables: str) -> tuple[bool, int]:
    """Whether the limits were set, and page faults of ten batches of samples that are made and freed."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))} | variables
    command = [sys.executable, "-c", PAGE_FAULTS, argument]
    kept, count = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.split()
    return kept == "True", int(count)


def test_freed_memory_is_kept() -> None:
    kept, few = faults("keep")
    if not kept:
        pytest.skip("not glibc")
    assert few < PAGES / 10, f"{few} page faults"


@pytest.mark.slow
def test_limits_that_the_user_sets_stay() -> None:
    assert not faults("keep", MALLOC_TRIM_THRESHOLD_="100000")[0]
    assert not faults("keep", GLIBC_TUNABLES="glibc.malloc.trim_threshold=100000")[0]
