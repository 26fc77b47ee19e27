"""``kvos bench``: what it costs, beside plain Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvos.cli.help_text import HELP_SETTINGS, help_text

__all__ = ["bench_app"]

bench_app = typer.Typer(
    help=help_text(
        "Measurements on this machine, each beside plain Transformers with its own cache, in one run.",
        ("kvos bench decode", "step time at 1, 4 and 8 sequences, and prefill speed"),
    ),
    short_help="Measure, beside plain Transformers.",
    **HELP_SETTINGS,
)


@bench_app.callback()
def group() -> None:
    """Makes ``decode`` a command of a group, though it is the only one."""


@bench_app.command(
    help=help_text(
        "Time per decode step and prefill speed, with kvos and with plain Transformers.",
        ("kvos bench decode", "1, 4 and 8 sequences of 600 tokens"),
        ("kvos bench decode --sequences 1,16 --tokens 2000", "other sizes"),
    )
)
def decode(
    sequences: Annotated[str, typer.Option("--sequences", metavar="N,N", help="Sequences in a step.")] = "1,4,8",
    tokens: Annotated[int, typer.Option("--tokens", min=1, metavar="N", help="History of each, in tokens.")] = 600,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")] = None,
) -> None:
    """See help."""
