"""``python -m kvos.demo --resume JOB``: the second process of the demo. Without arguments: the demo itself."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from kvos.demo.resume import ResumeJob, resume
from kvos.demo.run import run_demo
from kvos.errors import KvosError

INTERRUPTED = 130


def main() -> int:
    """The process's exit code; stdout belongs to the events, whatever libraries print goes to stderr."""
    parser = argparse.ArgumentParser(prog="python -m kvos.demo", description=__doc__)
    parser.add_argument("--resume", type=Path, metavar="JOB", help="a file that the demo wrote for its second process")
    arguments = parser.parse_args()
    try:
        if arguments.resume is None:
            return run_demo()
        job = ResumeJob.from_dict(json.loads(arguments.resume.read_text(encoding="utf-8")))
        events = sys.stdout

        def emit(event: dict[str, Any]) -> None:
            events.write(json.dumps(event) + "\n")
            events.flush()

        with contextlib.redirect_stdout(sys.stderr):
            resume(job, emit)
    except KeyboardInterrupt:
        return INTERRUPTED
    except KvosError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
