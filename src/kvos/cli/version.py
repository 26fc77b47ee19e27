"""``kvos version``: what a bug report needs."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

import typer

import kvos
from kvos.cli.help_text import help_text
from kvos.config import KvosConfig

__all__ = ["VERSION_HELP", "print_version", "version"]

VERSION_HELP = help_text(
    "Versions of kvos and of what it stands on, and where it keeps its files.",
    ("kvos version", "all of it, for a bug report"),
    ("kvos --version", "one line"),
)
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "numba")


def version() -> None:
    """One line per package."""
    typer.echo(f"kvos {kvos.__version__}")
    typer.echo(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for package in PACKAGES:
        try:
            typer.echo(f"{package} {installed_version(package)}")
        except PackageNotFoundError:
            typer.echo(f"{package} is not installed")
    typer.echo(f"home {KvosConfig.from_env().home}")


def print_version(asked: bool) -> None:
    """Callback of ``--version``."""
    if asked:
        typer.echo(f"kvos {kvos.__version__}")
        raise typer.Exit
