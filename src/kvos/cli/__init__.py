"""The command ``kvos``: speaks to people. A command imports what it needs when it runs, so that help comes at once."""

from kvos.cli.app import app, main

__all__ = ["app", "main"]
