"""The folders of the disk cache: which there are, whose blocks lie in them, and which a person means. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvos.cli.console import short_dtype
from kvos.cli.processes import command_of, running_process
from kvos.errors import InvalidInputError
from kvos.tiers.disk.about import About, read_about
from kvos.tiers.disk.survey import FolderSurvey, survey_folder

__all__ = ["CacheFolder", "chosen_folders", "list_folders"]


@dataclass(frozen=True, slots=True)
class CacheFolder:
    """One folder: blocks of one shape, written with one codec. ``about`` is None where nobody wrote it down."""

    path: Path
    about: About | None
    survey: FolderSurvey

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def title(self) -> str:
        """Whose blocks, in a line."""
        if self.about is None:
            return "blocks of a model that is not known"
        return f"{', '.join(self.about.models)} in {short_dtype(self.about.dtype)}"

    @property
    def opened_by(self) -> int | None:
        """The process that opened it last, if that still runs."""
        about = self.about
        return about.pid if about and running_process(about.pid, about.process_started) else None

    @property
    def opened_by_command(self) -> str:
        """What was started there; empty if none runs."""
        about = self.about
        return command_of(running_process(about.pid, about.process_started)) if about else ""

    def as_dict(self) -> dict[str, Any]:
        about = asdict(self.about) if self.about else None
        return {"folder": self.name, "path": str(self.path), **asdict(self.survey), "about": about}


def list_folders(home: Path) -> tuple[CacheFolder, ...]:
    """Every folder that holds something, by size, the largest first. Raises OSError."""
    places = [path for path in (home / "blocks").glob("*") if path.is_dir()]
    found = [CacheFolder(path, read_about(path), survey_folder(path)) for path in places]
    held = [one for one in found if one.survey.packs or one.survey.blocks or one.survey.problem or one.about]
    return tuple(sorted(held, key=lambda one: (-one.survey.used_bytes, one.name)))


def chosen_folders(which: str | None, home: Path) -> tuple[CacheFolder, ...]:
    """Those that ``which`` means: a model's name, or the beginning of a folder's; all of them without it.

    Raises:
        InvalidInputError: it means none; the text says which there are.
        OSError: the folders cannot be read.
    """
    folders = list_folders(home)
    if which is None:
        return folders
    chosen = [one for one in folders if one.name.startswith(which) or (one.about and which in one.about.models)]
    if not chosen or not which:
        known = "; ".join(f"{one.name} ({one.title})" for one in folders) or "none"
        raise InvalidInputError(
            f"no folder of the disk cache and no model in it is called {which!r}; there are: {known}"
        )
    return tuple(chosen)
