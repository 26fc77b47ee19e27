"""Run as a script: convert in processes that are killed at every phase, then in two at once.

``killed_converter.py ENTRY.json GGUF HOME PHASES`` prints what was seen as JSON. One import of the libraries serves
all of them: each process is a fork.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from kvos.models.catalogue import CatalogueModel
from kvos.models.convert import convert_gguf  # noqa: F401  # imported before the forks, once
from kvos.models.fetch import install
from kvos.models.progress import SilentProgress
from kvos.models.store import model_folder, verify_folder


class KilledAt(SilentProgress):
    """kill -9 at the start of phase number ``at``, or at its first step."""

    def __init__(self, at: int, step: bool) -> None:
        self.at, self.step, self.phase = at, step, -1

    def begin(self, label: str, total: int | None) -> None:
        self.phase += 1
        if self.phase == self.at and not self.step:
            os.kill(os.getpid(), signal.SIGKILL)

    def update(self, done: int) -> None:
        if self.phase == self.at and done > 3:
            os.kill(os.getpid(), signal.SIGKILL)


def in_child(entry: CatalogueModel, home: Path, source: Path, progress: SilentProgress) -> int:
    """The pid of a fork that installs and ends."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            install(entry, home, source=source, progress=progress)
            code = 0
        finally:
            os._exit(code)
    return pid


def main() -> None:
    entry_file, source, home, phases = (Path(argument) for argument in sys.argv[1:])
    entry = CatalogueModel(**json.loads(entry_file.read_text()))
    target = model_folder(entry.name, home)
    seen: dict[str, object] = {"killed": [], "half_done": [], "leftovers": []}
    for phase in range(int(str(phases))):
        for step in (False, True):
            _, status = os.waitpid(in_child(entry, home, source, KilledAt(phase, step)), 0)
            if os.WIFSIGNALED(status):
                seen["killed"].append(phase)
                seen["half_done"].append(target.exists())
                seen["leftovers"].append(len(list(target.parent.glob(".*.tmp"))))
            elif target.exists():
                os.rename(target, home / f"finished-{phase}-{step}")
    both = [in_child(entry, home, source, SilentProgress()) for _ in range(2)]
    seen["both_codes"] = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in both]
    verify_folder(target, entry.name)
    seen["left_at_the_end"] = sorted(path.name for path in target.parent.iterdir())
    sys.stdout.write(json.dumps(seen))


if __name__ == "__main__":
    main()
