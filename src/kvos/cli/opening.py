"""Open a model while a person waits: what happens is shown on stderr."""

from __future__ import annotations

from typing import TYPE_CHECKING  # noqa: TID251 - no cycle: torch is imported when a model is opened, not for --help

from kvos.cli.console import error_console, working
from kvos.config import KvosConfig
from kvos.models.catalogue import find
from kvos.models.store import model_folder

if TYPE_CHECKING:
    from kvos.runtime import Runtime

__all__ = ["open_model"]


def open_model(model: str, config: KvosConfig) -> Runtime:
    """Open ``model``; it is fetched first, with its own progress bar, if it has to be.

    Raises: as ``kvos.open``.
    """
    entry = find(model)
    if entry is not None and not model_folder(entry.name, config.home).is_dir() and not config.offline:
        from kvos.models.fetch import fetch
        from kvos.models.progress import BarProgress

        error_console().print(f"{entry.title} is not on this machine yet; fetching it once.")
        fetch(model, config.home, progress=BarProgress())
    with working(f"Loading {model} ..."):
        from kvos.runtime import open_runtime

        return open_runtime(model, config=config)
