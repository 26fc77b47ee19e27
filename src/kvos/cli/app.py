"""All commands under one roof."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from kvos.cli.bench import bench_app
from kvos.cli.cache import cache_app
from kvos.cli.chat.command import CHAT_HELP, chat
from kvos.cli.demo import DEMO_HELP, demo
from kvos.cli.failures import KvosGroup, quiet_libraries
from kvos.cli.help_text import HELP_SETTINGS, help_text
from kvos.cli.model import model_app
from kvos.cli.models import MODELS_HELP, models
from kvos.cli.sessions import sessions_app
from kvos.cli.simulate import SIMULATE_HELP, simulate
from kvos.cli.stats import STATS_HELP, stats
from kvos.cli.verify import VERIFY_HELP, verify
from kvos.cli.version import VERSION_HELP, print_version, version

__all__ = ["app", "main"]

START, MEASURE, KEEP = "Talk and see", "Check and measure", "What is kept"

ROOT_HELP = help_text(
    """
    The memory manager that an LLM agent's context runs on.

    An agent's history is read from a paged KV cache instead of being computed again each turn: sessions go on where
    they were, forks share every block of their common past, and a saved session comes back in another process. kvos
    runs the model itself, on this machine; the first use fetches a small one (93 MB), and from then on no network is
    needed.
    """,
    ("kvos demo", "an agent's life in a few minutes, checked against a run without cache"),
    ("kvos chat", "a conversation; /blocks and /fork show what the cache does"),
    ("kvos verify --rounds 20", "is every cache hit equal to a recompute?"),
    ("kvos stats", "what running kvos processes reuse and hold"),
    after="Every setting has an environment variable, too: KVOS_HOME, KVOS_DTYPE, KVOS_CACHE_BYTES, KVOS_OFFLINE ...",
)

app = typer.Typer(cls=KvosGroup, help=ROOT_HELP, name="kvos", **HELP_SETTINGS)
app.command(help=DEMO_HELP, rich_help_panel=START)(demo)
app.command(help=CHAT_HELP, rich_help_panel=START)(chat)
app.command(help=VERIFY_HELP, rich_help_panel=MEASURE)(verify)
app.add_typer(bench_app, name="bench", rich_help_panel=MEASURE)
app.command(help=SIMULATE_HELP, rich_help_panel=MEASURE)(simulate)
app.command(help=STATS_HELP, rich_help_panel=MEASURE)(stats)
app.command(help=MODELS_HELP, rich_help_panel=MEASURE)(models)
app.command(help=VERSION_HELP, rich_help_panel=MEASURE)(version)
app.add_typer(model_app, name="model", rich_help_panel=KEEP)
app.add_typer(sessions_app, name="sessions", rich_help_panel=KEEP)
app.add_typer(cache_app, name="cache", rich_help_panel=KEEP)


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from, with its traceback.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options in front of the command; ``KvosGroup`` reads ``debug`` too."""
    if not debug:
        quiet_libraries()


def main() -> None:
    """What the console script starts. A terminal that lacks a character shows ``?`` for it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    app()
