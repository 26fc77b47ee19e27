"""What every test may use: ``--long``, the hypothesis profiles, ``rounds``, the ``model`` marker, and one thread each.

Tests run side by side, one on each core (scripts/check), and a tiny model gains nothing from a second thread: torch
and the processes that a test starts have one, unless the test asks for more.

A test that needs the default model is marked ``model`` and is skipped, with the reason, where the model is not there.
Under ``--long`` a missing model is a failure, since that run is meant to leave nothing out.

Don't set ``max_examples`` in a test: the profile does, and a fixed number would hold in a long run, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, settings

from kvos.config import KvosConfig
from kvos.errors import ModelNotAvailableError
from kvos.models.store import model_folder, open_manifest

DEFAULT_MODEL = "smollm2-135m"
LONG_TIMEOUT_S = 3600

# A shared machine's time says nothing about the code: no deadline, and no complaint about slow generation of data.
# Stable in a short run, so that it fails for what was changed; a long run looks for what is new.
settings.register_profile(
    "default",
    max_examples=30,
    stateful_step_count=30,
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("long", settings.get_profile("default"), max_examples=1000, derandomize=False)


os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("KVOS_DISK_CACHE_BYTES", "0")  # what a test keeps on disk, it asks for


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="full counts of rounds, and the tests that are marked long")


@pytest.hookimpl(tryfirst=True)  # pytest-timeout reads its option in the same hook
def pytest_configure(config: pytest.Config) -> None:
    long = config.getoption("long")
    settings.load_profile("long" if long else "default")
    if long and config.option.timeout is None:
        config.option.timeout = LONG_TIMEOUT_S


@cache
def missing_model() -> str | None:
    """Why the default model cannot be used, None if it can. A damaged one raises: that is no reason to skip."""
    try:
        open_manifest(model_folder(DEFAULT_MODEL, KvosConfig.from_env().home), DEFAULT_MODEL)
    except ModelNotAvailableError as error:
        return str(error)
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    long = item.config.getoption("long")
    if item.get_closest_marker("long") and not long:
        pytest.skip("full counts: run with --long")
    if item.get_closest_marker("model") and (reason := missing_model()):
        if long:
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests with the longest time limits first, so that no core is left alone with one at the end."""

    def limit(item: pytest.Item) -> float:
        marker = item.get_closest_marker("timeout")
        return marker.args[0] if marker else 0

    items.sort(key=limit, reverse=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What long tests recorded with ``record_property``, so that the log of a long run holds their figures."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties if report.when == "call" else ():
            terminalreporter.write_line(f"{name}\n{value}")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A runtime that was opened with ``threads=`` has set them for the process."""
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def rounds(request: pytest.FixtureRequest) -> Callable[[int, int], int]:
    """``rounds(short, long)``: the second number under ``--long``, else the first."""
    is_long = bool(request.config.getoption("long"))

    def choose(short: int, long: int) -> int:
        return long if is_long else short

    return choose
