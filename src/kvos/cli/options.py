"""Options that several commands share, and the settings that follow from them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from kvos.config import KvosConfig
from kvos.models.catalogue import DEFAULT_MODEL
from kvos.types import DType

__all__ = [
    "DEFAULT_MODEL",
    "BlockSizeOption",
    "DTypeChoice",
    "DTypeOption",
    "DeviceOption",
    "JsonOption",
    "ModelOption",
    "settings",
]


class DTypeChoice(StrEnum):
    """``auto`` and the names of ``DType``."""

    AUTO = "auto"
    FP32 = DType.FP32.value
    BF16 = DType.BF16.value
    FP16 = DType.FP16.value
    FP64 = DType.FP64.value


ModelOption = Annotated[
    str,
    typer.Option(
        "--model", "-m", metavar="MODEL", help="A name ([cyan]kvos model list[/cyan]), a model's folder, or a hub id."
    ),
]
DTypeOption = Annotated[
    DTypeChoice | None,
    typer.Option("--dtype", help="Compute and cache in it; auto is bf16 where the hardware has it, else fp32."),
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N.", show_default=False)
]
BlockSizeOption = Annotated[
    int | None,
    typer.Option("--block-size", metavar="TOKENS", help="Tokens per block: 8, 16, 32, 64 or 128.", show_default=False),
]


def _in_a_folder(path: Path | None) -> Path | None:
    """Find out before minutes of work, not after."""
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.absolute().parent}")
    return path


JsonOption = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        dir_okay=False,
        writable=True,
        callback=_in_a_folder,
        help="Write the figures there, as data.",
        show_default=False,
    ),
]


def settings(
    *, dtype: DTypeChoice | None = None, device: str | None = None, block_size: int | None = None
) -> KvosConfig:
    """What the options say, else the environment (``KVOS_*``), else the defaults.

    Raises:
        InvalidConfigError: a value outside its range.
    """
    given: dict[str, Any] = {
        "dtype": None if dtype is None else dtype.value,
        "device": device,
        "block_size": block_size,
    }
    return KvosConfig.from_env(**{name: value for name, value in given.items() if value is not None})
