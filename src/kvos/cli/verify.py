"""``kvos verify``: promise 1 as a command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvos.cli.help_text import help_text
from kvos.cli.options import DEFAULT_MODEL, DTypeOption, ModelOption

__all__ = ["VERIFY_HELP", "verify"]

VERIFY_HELP = help_text(
    """
    Is every cache hit equal to a recompute?

    Runs random histories (append, fork, truncate, share, save and load) and compares the logits with a run of the
    same token ids without any cache. In fp64 they must agree to 1e-6; in a working dtype within the noise that the
    model itself shows without a cache, which is measured first.
    """,
    ("kvos verify", "a quick look, in the dtype that kvos would choose"),
    ("kvos verify --dtype fp64 --rounds 200", "the logic alone, thoroughly"),
    ("kvos verify --rounds 1 --seed 17", "one history again"),
    after="Exit code 1 means a mismatch; the seed and the shortest history that shows it are printed.",
)


def verify(
    model: ModelOption = DEFAULT_MODEL,
    dtype: DTypeOption = None,
    rounds: Annotated[int, typer.Option("--rounds", "-n", min=1, metavar="N", help="Random histories.")] = 20,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of the first history.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")] = None,
) -> None:
    """See ``VERIFY_HELP``."""
