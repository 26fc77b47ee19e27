"""The main job end to end, live: an agent's conversation, its forks, its life in another process, and the check."""

from kvos.demo.record import DemoRecord
from kvos.demo.run import run_demo
from kvos.demo.script import Question, Script, default_script

__all__ = ["DemoRecord", "Question", "Script", "default_script", "run_demo"]
