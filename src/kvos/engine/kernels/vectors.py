"""Vector operations on memory addresses, for Numba code: each becomes a few LLVM instructions, inlined.

Numba's arrays leave it to LLVM to guess that loops over a head's elements do not overlap, which costs checks in the
innermost loop and seconds of compilation. Here a head is one LLVM vector; the compiler splits it into the registers
that the machine has. Addresses are int64, elements float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import llvmlite.ir as llvm
from numba import types
from numba.extending import intrinsic

__all__ = ["VectorOps", "call_address", "divide", "load_float", "load_int", "prefetch", "store_float", "vector_ops"]

_FLOAT = llvm.FloatType()
_INT32 = llvm.IntType(32)
_INT64 = llvm.IntType(64)
_CACHE_LINE = 64
_REASSOCIATE = ("reassoc", "contract", "nsz")


def _at(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _load(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(_at(builder, address, kind), align=8 if kind == _INT64 else 4)


def _store(builder: Any, value: Any, address: Any) -> Any:
    return builder.store(value, _at(builder, address, value.type), align=4)


@intrinsic  # type: ignore[untyped-decorator]
def load_int(typingctx: Any, address: Any) -> Any:
    """The int64 at an address."""
    return types.int64(types.int64), lambda _, builder, __, arguments: _load(builder, arguments[0], _INT64)


@intrinsic  # type: ignore[untyped-decorator]
def load_float(typingctx: Any, address: Any) -> Any:
    """The float32 at an address."""
    return types.float32(types.int64), lambda _, builder, __, arguments: _load(builder, arguments[0], _FLOAT)


@intrinsic  # type: ignore[untyped-decorator]
def store_float(typingctx: Any, address: Any, value: Any) -> Any:
    """Put a float32 at an address."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _store(builder, arguments[1], arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), codegen


@intrinsic  # type: ignore[untyped-decorator]
def call_address(typingctx: Any, address: Any) -> Any:
    """Call ``int32 function(void)`` at an address."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.call(_at(builder, arguments[0], llvm.FunctionType(_INT32, ())), ())

    return types.int32(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def divide(typingctx: Any, a: Any, b: Any) -> Any:
    """``a // b`` of numbers that are not negative; ``b`` is never zero. Unlike ``//`` it cannot raise."""
    return types.int64(types.int64, types.int64), lambda _, builder, __, arguments: builder.udiv(*arguments)


@dataclass(frozen=True, slots=True)
class VectorOps:
    """Operations on vectors of one length.

    Attributes:
        clear: ``clear(target)``.
        copy: ``copy(target, source)``.
        scale: ``scale(target, source, factor)``: target = source * factor.
        dot: ``dot(a, b)``, the float32 sum of products.
        add: ``add(target, source, factor)``: target += source * factor.
        add_four: ``add_four(target, source, stride, factors)``: four sources, ``stride`` bytes apart, with the four
            float32 at ``factors``.
        soften: ``soften(scores)``: scores become ``exp(scores - max)``; returns the maximum.
        total: ``total(source)``, the sum of its elements.
    """

    clear: Any
    copy: Any
    scale: Any
    dot: Any
    add: Any
    add_four: Any
    soften: Any
    total: Any


@cache
def prefetch(size: int) -> Any:
    """``prefetch(address)``: bring ``size`` bytes close to the core. Never faults, whatever the address."""
    pointer, flag = llvm.IntType(8).as_pointer(), _INT32
    kind = llvm.FunctionType(llvm.VoidType(), (pointer, flag, flag, flag))

    def emit(builder: Any, arguments: Any) -> None:
        name = f"llvm.prefetch.{pointer.intrinsic_name}"
        function = builder.module.globals.get(name) or llvm.Function(builder.module, kind, name)
        for line in range(0, size, _CACHE_LINE):
            at = builder.inttoptr(builder.add(arguments[0], _INT64(line)), pointer)
            builder.call(function, (at, flag(0), flag(3), flag(1)))  # to read, into all levels, data

    return _intrinsic(1, types.void(types.int64), emit)


@cache
def vector_ops(length: int) -> VectorOps:
    """Operations on vectors of ``length`` float32."""
    vector = llvm.VectorType(_FLOAT, length)
    address, number = types.int64, types.float32
    return VectorOps(
        clear=_intrinsic(1, types.void(address), lambda b, a: _store(b, _constant(vector, 0.0), a[0])),
        copy=_intrinsic(2, types.void(address, address), lambda b, a: _store(b, _load(b, a[1], vector), a[0])),
        scale=_intrinsic(
            3,
            types.void(address, address, number),
            lambda b, a: _store(b, b.fmul(_load(b, a[1], vector), _splat(b, a[2], vector)), a[0]),
        ),
        dot=_intrinsic(
            2,
            number(address, address),
            lambda b, a: _sum(b, b.fmul(_load(b, a[0], vector), _load(b, a[1], vector), flags=_REASSOCIATE)),
        ),
        add=_intrinsic(3, types.void(address, address, number), lambda b, a: _add(b, vector, a[0], [(a[1], a[2])])),
        add_four=_intrinsic(4, types.void(address, address, address, address), lambda b, a: _add_four(b, vector, *a)),
        soften=_intrinsic(1, number(address), lambda b, a: _soften(b, vector, a[0])),
        total=_intrinsic(1, number(address), lambda b, a: _sum(b, _load(b, a[0], vector))),
    )


def _intrinsic(arity: int, signature: Any, emit: Callable[[Any, Any], Any]) -> Any:
    def codegen(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        result = emit(builder, arguments)
        return context.get_dummy_value() if signature.return_type == types.void else result

    # Numba counts the parameters, so there is one function per arity.
    typers: dict[int, Any] = {
        1: lambda typingctx, a: (signature, codegen),
        2: lambda typingctx, a, b: (signature, codegen),
        3: lambda typingctx, a, b, c: (signature, codegen),
        4: lambda typingctx, a, b, c, d: (signature, codegen),
    }
    return intrinsic(typers[arity])


def _splat(builder: Any, value: Any, vector: Any) -> Any:
    undefined = llvm.Constant(vector, llvm.Undefined)
    first = builder.insert_element(undefined, value, _INT32(0))
    return builder.shuffle_vector(
        first, undefined, llvm.Constant(llvm.VectorType(_INT32, vector.count), [0] * vector.count)
    )


def _constant(vector: Any, value: float) -> Any:
    return llvm.Constant(vector, [value] * vector.count)


def _function(builder: Any, name: str, result: Any, arguments: tuple[Any, ...], vector: Any) -> Any:
    kind = "i32" if vector.element == _INT32 else "f32"
    full = f"llvm.{name}.v{vector.count}{kind}"
    found = builder.module.globals.get(full)
    return found or llvm.Function(builder.module, llvm.FunctionType(result, arguments), full)


def _sum(builder: Any, values: Any) -> Any:
    vector = values.type
    reduce = _function(builder, "vector.reduce.fadd", _FLOAT, (_FLOAT, vector), vector)
    return builder.call(reduce, (llvm.Constant(_FLOAT, 0.0), values), fastmath=_REASSOCIATE)


def _fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    vector = a.type
    return builder.call(_function(builder, "fmuladd", vector, (vector,) * 3, vector), (a, b, c))


def _add(builder: Any, vector: Any, target: Any, terms: list[tuple[Any, Any]]) -> Any:
    total = _load(builder, target, vector)
    for source, factor in terms:
        total = _fused(builder, _load(builder, source, vector), _splat(builder, factor, vector), total)
    return _store(builder, total, target)


def _add_four(builder: Any, vector: Any, target: Any, source: Any, stride: Any, factors: Any) -> Any:
    terms = []
    for token in range(4):
        row = builder.add(source, builder.mul(stride, _INT64(token)))
        terms.append((row, _load(builder, builder.add(factors, _INT64(4 * token)), _FLOAT)))
    return _add(builder, vector, target, terms)


def _soften(builder: Any, vector: Any, scores: Any) -> Any:
    values = _load(builder, scores, vector)
    top = builder.call(
        _function(builder, "vector.reduce.fmax", _FLOAT, (vector,), vector), (values,), fastmath=("nnan",)
    )
    _store(builder, _exp(builder, builder.fsub(values, _splat(builder, top, vector))), scores)
    return top


def _exp(builder: Any, x: Any) -> Any:
    """``exp(x)`` for ``x <= 0``: reduction to ``2**n * exp(r)`` with ``|r| <= ln(2) / 2``, a polynomial of degree 7.

    Relative error below 2e-7; zero below -87.
    """
    vector = x.type
    whole_numbers = llvm.VectorType(_INT32, vector.count)
    low = _constant(vector, -87.0)
    tiny = builder.fcmp_ordered("<", x, low)
    x = builder.select(tiny, low, x)
    scaled = _fused(builder, x, _constant(vector, _LOG2_E), _constant(vector, 0.5))
    n = builder.call(_function(builder, "floor", vector, (vector,), vector), (scaled,))
    r = _fused(builder, n, _constant(vector, -_LN2_HIGH), x)
    r = _fused(builder, n, _constant(vector, -_LN2_LOW), r)
    p = _constant(vector, _EXP_SERIES[0])
    for coefficient in _EXP_SERIES[1:]:
        p = _fused(builder, p, r, _constant(vector, coefficient))
    exponent = builder.add(builder.fptosi(n, whole_numbers), llvm.Constant(whole_numbers, [127] * vector.count))
    power = builder.bitcast(builder.shl(exponent, llvm.Constant(whole_numbers, [23] * vector.count)), vector)
    return builder.select(tiny, _constant(vector, 0.0), builder.fmul(p, power))


_LOG2_E = 1.44269502162933349609375
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
"""ln(2) in two parts, the first exact in few bits, so that ``n * ln(2)`` loses nothing (Cody and Waite)."""

_EXP_SERIES = tuple(1.0 / factor for factor in (5040, 720, 120, 24, 6, 2, 1, 1))
