"""Which dtype and device a setting stands for on this machine."""

from __future__ import annotations

from typing import Literal

import torch

from kvos.errors import InvalidConfigError
from kvos.types import DType

__all__ = ["computes_in_bf16", "resolve_device", "resolve_dtype", "short_name", "torch_dtype"]

_TORCH_DTYPES = {
    DType.FP64: torch.float64,
    DType.FP32: torch.float32,
    DType.BF16: torch.bfloat16,
    DType.FP16: torch.float16,
}
_BF16_CAPABILITIES = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
"""Instructions that multiply in bf16, by torch's names; x86 first, then Arm."""


def torch_dtype(dtype: DType) -> torch.dtype:
    """Torch's name for it."""
    return _TORCH_DTYPES[dtype]


def short_name(dtype: torch.dtype) -> DType:
    """The field's name for it.

    Raises:
        InvalidConfigError: a dtype that kvos doesn't compute in.
    """
    for name, candidate in _TORCH_DTYPES.items():
        if candidate == dtype:
            return name
    raise InvalidConfigError(
        f"the model's dtype is {dtype}; kvos computes in {', '.join(name.value for name in DType)}"
    )


def resolve_device(choice: str) -> torch.device:
    """``auto`` is CUDA if there is one, else the CPU.

    Raises:
        InvalidConfigError: a CUDA device that this machine, or this build of torch, doesn't have.
    """
    if choice == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(choice)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            expected = "'auto' or 'cpu'" if count == 0 else f"an index below {count}"
            raise InvalidConfigError(
                f"device is {choice!r}; torch {torch.__version__} sees {count} CUDA devices: {expected}"
            )
    return device


def resolve_dtype(choice: DType | Literal["auto"], device: torch.device) -> torch.dtype:
    """``auto`` is bf16 where ``device`` computes in it, else fp32: emulated bf16 is slower than fp32."""
    if choice == "auto":
        return torch.bfloat16 if computes_in_bf16(device) else torch.float32
    return torch_dtype(choice)


def computes_in_bf16(device: torch.device) -> bool:
    """Whether ``device`` has instructions for bf16; emulation doesn't count."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0) or torch.version.hip is not None
    if device.type != "cpu":
        return False
    capabilities = getattr(torch.cpu, "get_capabilities", None)  # torch 2.10 and newer
    if capabilities is not None:
        return any(capabilities().get(name, False) for name in _BF16_CAPABILITIES)
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, probe, lambda: False)()) for probe in probes)
