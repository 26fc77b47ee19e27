"""PyTorch's own OpenMP threads, for compiled kernels.

A second thread pool (Numba's, or a Python one) would spin against PyTorch's for the same cores, in every layer of every
step. So kernels are started through ``GOMP_parallel`` of the very libgomp that PyTorch has loaded.
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["WorkerThreads"]


@dataclass(frozen=True, slots=True)
class WorkerThreads:
    """Entry points of the loaded libgomp, as addresses for compiled code."""

    thread_number: int
    thread_count: int
    barrier: int
    _parallel: Any

    @classmethod
    def find(cls) -> WorkerThreads | None:
        """PyTorch's pool; None where PyTorch uses another runtime than libgomp."""
        library = _loaded_libgomp()
        if library is None:
            return None
        parallel = library.GOMP_parallel
        parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        parallel.restype = None
        names = ("omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier")
        number, count, barrier = (ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names)
        return cls(number, count, barrier, parallel)

    def run(self, function: int, argument: int) -> None:
        """Call ``void function(void *argument)`` on as many threads as PyTorch uses; returns when all are done."""
        self._parallel(function, argument, torch.get_num_threads(), 0)


def _loaded_libgomp() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux") or "OpenMP" not in torch.__config__.parallel_info():
        return None
    package = Path(torch.__file__).parent
    shipped = [*package.glob("lib/libgomp*.so*"), *package.parent.glob("torch.libs/libgomp*.so*")]
    for name in (*map(str, shipped), "libgomp.so.1"):
        try:
            return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        except OSError:
            continue
    return None
