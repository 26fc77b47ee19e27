"""A pytest plugin for the runs on a changed copy of kvos: proves which copy was imported, and looks harder.

Loaded with ``-p mutation.source_guard --kvos-from FOLDER``. The run ends with ``WRONG_SOURCE`` if any module of kvos
came from elsewhere, such as an editable installation.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import Phase, settings

WRONG_SOURCE = 99


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kvos-from", help="the only folder that kvos may be imported from")
    parser.addoption("--harder", action="store_true", help="more examples, but stop at the first failure as it is")


@pytest.hookimpl(trylast=True)  # after tests/conftest.py has loaded its profile
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("harder"):
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("harder", settings.default, max_examples=400, phases=phases, print_blob=False)
        settings.load_profile("harder")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    source = Path(session.config.getoption("kvos_from")).resolve()
    imported = [module for name, module in sys.modules.items() if name.partition(".")[0] == "kvos"]
    files = [Path(str(module.__file__)).resolve() for module in imported]
    if not files or not all(file.is_relative_to(source) for file in files):
        session.exitstatus = WRONG_SOURCE
