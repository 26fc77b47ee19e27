"""``kvos demo``: the main job, live."""

from __future__ import annotations

import typer

from kvos.cli.console import output_console, working
from kvos.cli.help_text import help_text
from kvos.cli.options import DEFAULT_MODEL, DTypeOption, JsonOption, ModelOption, settings

__all__ = ["DEMO_HELP", "demo"]

DEMO_HELP = help_text(
    """
    An agent's life on this cache, live, and checked.

    A supervisor with a long system prompt answers a customer turn by turn, forks three sub-agents that work side by
    side over the shared prefix, is saved, and goes on in another process. At the end the same token ids run without
    any cache, and one line says whether every reuse equalled a recompute.
    """,
    ("kvos demo", "four to six minutes on two cores"),
    ("kvos demo --json demo.json", "the figures as data, too"),
    after="Exit code 1 means that a reuse did not equal its recompute.",
)


def demo(json_file: JsonOption = None, model: ModelOption = DEFAULT_MODEL, dtype: DTypeOption = None) -> None:
    """See ``DEMO_HELP``."""
    chosen = settings(dtype=dtype).dtype
    with working("Loading PyTorch ..."):
        from kvos.demo import run_demo
    raise typer.Exit(run_demo(model, dtype=str(chosen), json_path=json_file, console=output_console()))
