"""Machine code of the decode kernel: compiled by Numba once per machine, kept on disk, loaded in milliseconds.

Compiling takes seconds, and importing Numba a good part of one; both would be paid before the first token of every
process. A kept file is native code, so it is loaded only if this user owns it, nobody else can write it, and its digest
holds; anything else is compiled anew. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import stat
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from kvos.errors import MissingDependencyError

__all__ = ["Geometry", "LoadedKernel", "load_decode"]

_SOURCES = ("numba_decode.py", "task.py", "vectors.py")


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a kernel is compiled for: KV heads, query heads per KV head, sizes of a key and a value head."""

    kv_heads: int
    group: int
    k_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """Machine code in memory, for as long as this object lives.

    Attributes:
        address: of ``void decode(int64 task)``.
        call: the same, callable; releases the interpreter lock.
    """

    address: int
    call: Any
    _owner: Any


@cache
def load_decode(geometry: Geometry, folder: Path | None) -> LoadedKernel:
    """The decode kernel, from ``folder`` if it is there, else compiled, and kept there.

    Args:
        geometry: of the attention layers.
        folder: for kept code, made if need be; None compiles and keeps nothing.
    """
    if folder is None:
        return _load(*_compile(geometry))
    path = folder / f"decode-{_recipe(geometry)}.o"
    kept = _read(path)
    if kept is None:
        kept = _compile(geometry)
        _write(path, *kept)
    return _load(*kept)


def _recipe(geometry: Geometry) -> str:
    """Digest of all that the machine code depends on."""
    digest = hashlib.blake2b(repr(geometry).encode(), digest_size=16)
    for source in _SOURCES:
        digest.update(Path(__file__).with_name(source).read_bytes())
    features = llvm.get_host_cpu_features().flatten()
    for fact in (version("numba"), version("llvmlite"), llvm.get_host_cpu_name(), features, llvm.get_default_triple()):
        digest.update(fact.encode() + b"\0")
    return digest.hexdigest()


def _compile(geometry: Geometry) -> tuple[str, bytes]:
    """Symbol and object code. Takes seconds.

    Raises:
        MissingDependencyError: this version of Numba cannot do it.
    """
    from numba.core.errors import NumbaError

    from kvos.engine.kernels.numba_decode import compile_decode

    try:
        function = compile_decode(geometry.kv_heads, geometry.group, geometry.k_dim, geometry.v_dim)
        return function._wrapper_name, function._library._get_compiled_object()
    except (NumbaError, AttributeError) as error:
        raise MissingDependencyError(
            f"Numba {version('numba')} could not compile the attention kernel ({error}); "
            "install another version with pip install 'kvos[fast]', or use kernels='generic'"
        ) from error


def _load(symbol: str, code: bytes) -> LoadedKernel:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    address = engine.get_function_address(symbol)
    if address == 0:
        raise MissingDependencyError(f"the compiled attention kernel has no function {symbol!r}")
    return LoadedKernel(address, ctypes.CFUNCTYPE(None, ctypes.c_int64)(address), engine)


def _read(path: Path) -> tuple[str, bytes] | None:
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                return None
            header, _, code = file.read().partition(b"\n")
    except OSError:
        return None
    if facts.st_uid != os.geteuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return None
    try:
        known = json.loads(header)
        symbol = str(known["symbol"])
        return (symbol, code) if known["digest"] == _digest(symbol, code) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _without_waiting(path: str, flags: int) -> int:
    """Opening a named pipe would wait for somebody who writes into it."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _digest(symbol: str, code: bytes) -> str:
    return hashlib.blake2b(symbol.encode() + b"\0" + code).hexdigest()


def _write(path: Path, symbol: str, code: bytes) -> None:
    """Keep the code; a folder that cannot be written costs a compilation next time, nothing else."""
    header = json.dumps({"symbol": symbol, "digest": _digest(symbol, code)}).encode()
    unfinished: str | None = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, unfinished = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(descriptor, "wb") as file:
            file.write(header + b"\n" + code)
        os.replace(unfinished, path)
    except OSError:
        if unfinished is not None:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
