"""How much a cache may take when nobody said."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from kvos.models.memory import available_bytes, container_bytes, default_cache_bytes

CPU = torch.device("cpu")


def test_on_a_cpu_it_is_at_most_a_quarter_of_memory_and_4_gib() -> None:
    chosen = default_cache_bytes(CPU)
    assert 0 < chosen <= min(4 << 30, psutil.virtual_memory().total // 4)
    assert available_bytes(CPU) <= psutil.virtual_memory().total


def test_a_containers_limit_counts_and_its_page_cache_is_free(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    assert container_bytes(tmp_path) == 450


def test_no_limit_and_no_container_are_no_limit(tmp_path: Path) -> None:
    assert container_bytes(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    assert container_bytes(tmp_path) is None
