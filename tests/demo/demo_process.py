"""A process that plays the demo with a toy model, for a test that ends it early: MODEL_FOLDER, STORY (JSON)."""

from __future__ import annotations

import json
import sys

from rich.console import Console

from kvos.demo import Script, run_demo

if __name__ == "__main__":
    story = json.loads(sys.argv[2])
    try:
        code = run_demo(sys.argv[1], script=Script.from_json(story, story["system"]), console=Console(width=120))
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
