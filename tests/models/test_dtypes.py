"""What ``auto`` stands for, checked against what the operating system says of the hardware."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from kvos.errors import InvalidConfigError
from kvos.models.dtypes import computes_in_bf16, resolve_device, resolve_dtype, short_name, torch_dtype
from kvos.types import DType

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (DType.FP64, torch.float64),
        (DType.FP32, torch.float32),
        (DType.BF16, torch.bfloat16),
        (DType.FP16, torch.float16),
    ],
)
def test_a_named_dtype_is_taken_as_named_and_named_again(name: DType, expected: torch.dtype) -> None:
    assert resolve_dtype(name, CPU) == torch_dtype(name) == expected
    assert short_name(expected) is name


@pytest.mark.skipif(sys.platform != "linux", reason="reads the flags that Linux shows")
def test_auto_is_bf16_only_where_the_cpu_has_instructions_for_it() -> None:
    words = set(Path("/proc/cpuinfo").read_text().split())
    has_bf16 = bool(words & {"avx512_bf16", "amx_bf16", "bf16", "svebf16"})
    assert computes_in_bf16(CPU) == has_bf16
    assert resolve_dtype("auto", CPU) == (torch.bfloat16 if has_bf16 else torch.float32)


def test_a_device_that_is_not_there_is_refused_with_what_is() -> None:
    with pytest.raises(InvalidConfigError, match="cuda:99"):
        resolve_device("cuda:99")
    assert resolve_device("cpu") == CPU
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_a_dtype_that_kvos_does_not_compute_in_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match="int8"):
        short_name(torch.int8)
