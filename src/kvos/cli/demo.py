"""``kvos demo``: the main job, live."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvos.cli.help_text import help_text

__all__ = ["DEMO_HELP", "demo"]

DEMO_HELP = help_text(
    """
    An agent's life on this cache, live, and checked.

    A supervisor with a long system prompt answers a customer turn by turn, forks three sub-agents that work side by
    side over the shared prefix, is saved, and goes on in another process. At the end the same token ids run without
    any cache, and one line says whether every reuse equalled a recompute.
    """,
    ("kvos demo", "a few minutes on two cores"),
    ("kvos demo --json demo.json", "the figures as data, too"),
)


def demo(
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")] = None,
) -> None:
    """See ``DEMO_HELP``."""
