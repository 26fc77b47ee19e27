"""``kvos models``: which architectures run, and which are refused."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from kvos.cli.console import output_console
from kvos.cli.help_text import help_text
from kvos.models.architectures import ARCHITECTURES, REFUSED, as_data

__all__ = ["MODELS_HELP", "models"]

MODELS_HELP = help_text(
    """
    Which model architectures run exactly, and which are refused, and why.

    The type is what a model's config.json calls model_type. Every type of the first table was tested against its own
    eager attention; whatever is in neither table was not tested, and is refused unless KVOS_UNTESTED_MODELS=1 is set
    and it passes a self-test. (`kvos model` is about models on this machine.)
    """,
    ("kvos models", "both tables"),
    ("kvos models --json", "as data"),
)


def models(as_json: Annotated[bool, typer.Option("--json", help="As JSON on stdout.")] = False) -> None:
    """See ``MODELS_HELP``."""
    if as_json:
        typer.echo(json.dumps(as_data(), indent=2))
        return
    console = output_console()
    tested = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("TYPE", "MODELS", "WHAT KVOS HANDLES"):
        tested.add_column(column, overflow="fold")
    for one in ARCHITECTURES.values():
        needs = "; ".join(need.value for need in one.needs)
        tested.add_row(Text(one.model_type, "green"), one.title, Text(needs or "causal attention", "dim"))
    console.print(tested)
    refused = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("REFUSED", "BECAUSE IT HAS"):
        refused.add_column(column, overflow="fold")
    for no in REFUSED.values():
        refused.add_row(Text(no.model_type, "red"), no.has)
    console.print()
    console.print(refused)
