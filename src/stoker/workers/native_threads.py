"""Gives workers the native threads that torch's have: one for torch itself, and as many as elsewhere for NumPy's BLAS.

The last bits of a large sum or matrix product depend on this number. Both functions that set it here belong to the
calling thread (OpenMP 5.2, 2.4, "data environment ICVs"), so no other thread of the script sees a change.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


def _function(name: str) -> Callable[..., int]:
    """Returns a function of torch's own libraries. In a build without it there is no count to set."""
    try:
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))[name]
    except (OSError, AttributeError):
        return lambda *_: 1


_set_openmp, _openmp_count = _function("omp_set_num_threads"), _function("omp_get_max_threads")
# Returns the thread's count before; 0 if it had none of its own. Once ``torch.set_num_threads`` was called, MKL does
# not follow OpenMP's count.
_set_mkl = _function("MKL_Set_Num_Threads_Local")


def cap_process() -> None:
    """Does in a worker process what torch's workers do. OpenCV, whose results do not depend on threads, gets none: its
    threads do not exist after a fork, and a call that waits for them hangs."""
    torch.set_num_threads(1)
    cv2 = sys.modules.get("cv2")
    if cv2 is not None:
        cv2.setNumThreads(0)  # 1 would try to end threads that do not exist


def cap_thread() -> None:
    """Does the same for code that this thread calls; ``torch.set_num_threads`` would apply to later threads, too."""
    torch.get_num_threads()  # sets the thread's count at its first call, which must not undo the cap below
    _set_mkl(1)
    _set_openmp(1)


@contextmanager
def one_thread() -> Iterator[None]:
    """Gives the calling thread the native threads of a worker."""
    torch.get_num_threads()
    mkl, openmp = _set_mkl(1), _openmp_count()
    _set_openmp(1)
    try:
        yield
    finally:
        _set_mkl(mkl)
        _set_openmp(openmp)
