"""Names that can be imported, and the README's examples, which run as they are printed."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvos
from kvos.config import KvosConfig, subprocess_environment

REPOSITORY = Path(__file__).parents[1]
MODULES = sorted(
    module.name for module in pkgutil.walk_packages(kvos.__path__, "kvos.") if not module.name.endswith("__main__")
)


@pytest.mark.parametrize("name", ["kvos", *MODULES])
def test_what_a_module_lists_is_sorted_and_can_be_imported(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        if error.name in ("numba", "llvmlite"):
            pytest.skip("numba is optional")
        raise
    listed = getattr(module, "__all__", None)
    if listed is None:
        return
    assert len(set(listed)) == len(listed)
    # As ruff sorts them: constants, then classes, then functions.
    assert listed == sorted(listed, key=lambda entry: (0 if entry.isupper() else 1 if entry[0].isupper() else 2, entry))
    assert all(hasattr(module, entry) for entry in listed)


def test_the_package_knows_its_names_and_no_others() -> None:
    assert set(kvos.__all__) == set(kvos._PUBLIC)
    for name, (module, attribute) in kvos._PUBLIC.items():
        assert getattr(kvos, name) is getattr(importlib.import_module(module), attribute)
    with pytest.raises(AttributeError, match="nonsense"):
        kvos.nonsense  # noqa: B018


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=REPOSITORY,
        env=subprocess_environment(PYTHONPATH=str(REPOSITORY / "src"), **environment),
        capture_output=True,
        text=True,
        check=False,
    )


def test_importing_kvos_imports_no_library_that_takes_seconds() -> None:
    found = run("import sys, kvos; print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])")
    assert found.stdout.strip() == "[]", found.stderr


def readme_examples() -> list[str]:
    page = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def test_the_readme_has_two_short_examples() -> None:
    examples = readme_examples()
    assert len(examples) == 2
    for code in examples:
        assert 5 <= len(code.splitlines()) <= 15
        compile(code, "README.md", "exec")


@pytest.mark.model
@pytest.mark.timeout(600)  # kernels may have to be compiled first
def test_the_example_of_the_readme_runs_as_it_is_printed() -> None:
    found = run(readme_examples()[0])
    assert found.returncode == 0, found.stderr
    first_reply = found.stdout.strip().rpartition("\n")[0] or found.stdout
    computed, reused = map(int, re.findall(r" (\d+) (\d+)$", first_reply, re.MULTILINE)[0])
    assert computed > 30
    assert reused >= 0
    assert found.stdout.count("\n") >= 2, "two replies are printed"


@pytest.mark.model
@pytest.mark.timeout(600)
def test_the_readmes_session_comes_back_in_a_second_process(tmp_path: Path) -> None:
    for shared in ("models", "kernels"):
        (KvosConfig.from_env().home / shared).mkdir(exist_ok=True)
        (tmp_path / shared).symlink_to(KvosConfig.from_env().home / shared)
    counts = []
    for _ in range(2):
        found = run(readme_examples()[1], KVOS_HOME=str(tmp_path), KVOS_DISK_CACHE_BYTES=str(1 << 30))
        assert found.returncode == 0, found.stderr
        counts.append(tuple(map(int, re.findall(r"(\d+) tokens came back from disk, (\d+) were", found.stdout)[0])))
    (restored, first), (restored_later, second) = counts
    assert restored == 0
    # Blocks of 16 tokens. All full ones that the first run has seen come back; it generated up to 40 tokens more.
    assert restored_later % 16 == 0
    assert first - 16 < restored_later <= first + 40
    assert second < first


@pytest.mark.model
@pytest.mark.timeout(600)
def test_the_snippets_for_agent_developers_run_one_after_another() -> None:
    page = (REPOSITORY / "docs" / "agents.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(snippets) == 4
    found = run("\n".join([*snippets, "runtime.check_invariants()", "runtime.close()"]))
    assert found.returncode == 0, found.stderr
    assert re.search(r"""\[['"].+['"], ['"].+['"]\]""", found.stdout, re.DOTALL), "two sub-agents answered"
