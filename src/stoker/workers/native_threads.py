"""Caps native thread pools (OpenMP, OpenBLAS, MKL, OpenCV) at one thread in a worker: workers are the parallelism.

Otherwise each of N workers starts as many threads as there are cores, and they compete for the cores.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import threadpoolctl
import torch

# Packages with their own thread pools. Once another of them is imported, pools are searched for again.
_PACKAGES = ("cv2", "faiss", "mkl", "numba", "numpy", "scipy", "sklearn", "torch", "xgboost")
_found: dict[tuple[bool, ...], threadpoolctl.ThreadpoolController] = {}


def look() -> threadpoolctl.ThreadpoolController:
    """Returns this process's thread pools. Finding them takes 3 ms, so a parent does it before it forks."""
    loaded = tuple(name in sys.modules for name in _PACKAGES)
    if loaded not in _found:
        _found[loaded] = threadpoolctl.ThreadpoolController()
    return _found[loaded]


def cap_process() -> None:
    """Caps every pool of this process at one thread. For worker processes only."""
    torch.set_num_threads(1)
    for pool in look().lib_controllers:
        _set(pool, 1)
    cv2: Any = sys.modules.get("cv2")
    if cv2 is not None:
        cv2.setNumThreads(0)  # 0 runs without a pool; 1 would try to end threads that do not exist after a fork


def _set(pool: threadpoolctl.LibController, count: int) -> None:
    """Sets a pool's thread count. For OpenBLAS, writes the variable behind ``openblas_set_num_threads``: after a fork,
    that function would first restart all threads, which spin for 0.1 s of processor time before they sleep."""
    if pool.internal_api == "openblas":
        with suppress(AttributeError, ValueError):  # a build that does not export it
            ctypes.c_int.in_dll(pool.dynlib, "blas_cpu_number").value = count
            return
    pool.set_num_threads(count)


def _set_mkl() -> Callable[[int], int]:
    """Returns the function that sets the calling thread's count for the MKL inside torch, and returns the one before;
    0 is none of its own. Once the script has called ``torch.set_num_threads``, MKL does not obey OpenMP's count."""
    try:
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).MKL_Set_Num_Threads_Local
    except (OSError, AttributeError):  # a build without MKL, or with a library that threadpoolctl finds
        return lambda count: 0


set_mkl = _set_mkl()


def cap_thread() -> None:
    """Caps OpenMP and torch's MKL at one thread for code that this thread calls. OpenMP's count belongs to the thread
    that sets it (OpenMP 5.2, 2.4, "data environment ICVs"); torch obeys it. ``torch.set_num_threads`` would also apply
    to threads made later, including the user's. OpenBLAS and OpenCV have one count for the process, left alone."""
    torch.get_num_threads()  # sets the thread's count at its first call, which must not undo the cap below
    set_mkl(1)
    for pool in look().lib_controllers:
        if pool.user_api == "openmp":
            pool.set_num_threads(1)


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits the calling thread to one native thread, as in a worker: sums over large tensors and matrix products are
    then accumulated in the same order. BLAS has one count for the process, so other threads are limited as well."""
    torch.get_num_threads()  # torch sets a thread's count when the thread first asks for it
    pools = look().lib_controllers  # a sample's code may have imported more
    counts = [pool.get_num_threads() for pool in pools]
    mkl = set_mkl(1)
    try:
        for pool in pools:
            _set(pool, 1)
        yield
    finally:
        set_mkl(mkl)
        for pool, count in zip(pools, counts, strict=True):
            _set(pool, count)


look()  # on import, so that the first batch does not wait for it
