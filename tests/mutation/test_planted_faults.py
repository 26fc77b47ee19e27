"""Do the tests notice mistakes? Each planted fault, in a copy of the package, must make its tests fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mutation.faults import FAULTS as CACHE_FAULTS
from mutation.faults import PlantedFault
from mutation.model_faults import MODEL_FAULTS
from mutation.residency_faults import RESIDENCY_FAULTS
from mutation.session_faults import SESSION_FAULTS
from mutation.source_guard import WRONG_SOURCE
from mutation.tier_faults import TIER_FAULTS

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCE = REPOSITORY / "src"
PASSED, FAILED = 0, 1  # exit codes of pytest; a collection error, a usage error or a crash has another one

FAULTS = (*CACHE_FAULTS, *SESSION_FAULTS, *MODEL_FAULTS, *TIER_FAULTS, *RESIDENCY_FAULTS)

each_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))


def with_fault(fault: PlantedFault) -> str:
    """The text of the file with the fault in it."""
    text = (SOURCE / "kvos" / fault.file).read_text()
    assert text.count(fault.old) == 1, f"'{fault.name}': the text to replace occurs {text.count(fault.old)} times"
    return text.replace(fault.old, fault.new)


def copy_source(folder: Path) -> Path:
    return Path(shutil.copytree(SOURCE, folder / "src", ignore=shutil.ignore_patterns("__pycache__")))


def run_tests(source: Path, tests: tuple[str, ...], *options: str) -> subprocess.CompletedProcess[str]:
    """Run ``tests`` of this repository on the kvos in ``source``."""
    path = os.pathsep.join([str(source), str(REPOSITORY / "tests")])
    guard = ["-p", "mutation.source_guard", "--kvos-from", str(source)]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *guard, *options, *tests],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@each_fault
def test_a_fault_can_be_planted(fault: PlantedFault) -> None:
    """Cheap, so it runs always: whoever rewrites a line learns at once that a fault was to be planted there."""
    compile(with_fault(fault), fault.file, "exec")
    assert fault.tests
    assert all((REPOSITORY / test.partition("::")[0]).exists() for test in fault.tests)


def test_every_fault_has_its_own_name() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


@pytest.mark.long
@each_fault
def test_a_planted_fault_makes_a_test_fail(fault: PlantedFault, tmp_path: Path) -> None:
    source = copy_source(tmp_path)
    (source / "kvos" / fault.file).write_text(with_fault(fault))
    run = run_tests(source, fault.tests, "--harder")
    assert run.returncode == FAILED, f"nothing failed with '{fault.name}':\n{run.stdout[-3000:]}{run.stderr[-1000:]}"


@pytest.mark.long
def test_without_a_fault_the_same_tests_pass(tmp_path: Path) -> None:
    everything = tuple(sorted({test for fault in FAULTS for test in fault.tests}))
    run = run_tests(copy_source(tmp_path), everything)
    assert run.returncode == PASSED, run.stdout[-3000:] + run.stderr[-1000:]


@pytest.mark.long
def test_another_copy_of_the_package_would_be_noticed(tmp_path: Path) -> None:
    source = copy_source(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run = run_tests(source, ("tests/policy",), "--kvos-from", str(elsewhere))
    assert run.returncode == WRONG_SOURCE, run.stdout
