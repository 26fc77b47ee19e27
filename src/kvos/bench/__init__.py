"""Measurements, each beside plain Transformers with its own cache, in one run."""

from kvos.bench.decode import DecodeReport, PrefillRow, StepRow, bench_decode
from kvos.bench.table import render

__all__ = ["DecodeReport", "PrefillRow", "StepRow", "bench_decode", "render"]
