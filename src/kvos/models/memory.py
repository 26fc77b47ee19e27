"""How many bytes of KV cache a machine has room for."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

__all__ = ["available_bytes", "container_bytes", "default_cache_bytes"]

_CPU_SHARE, _CPU_LIMIT = 0.25, 4 << 30
_GPU_SHARE = 0.75
_CGROUP = Path("/sys/fs/cgroup")


def default_cache_bytes(device: torch.device) -> int:
    """What ``cache_bytes=None`` stands for now; call it after the weights are loaded.

    On the CPU a quarter of what is available, at most 4 GiB: the machine is shared with other programs, and that is
    90,000 tokens of the default model in fp32. On a GPU three quarters: the rest is for activations.
    """
    if device.type == "cpu":
        return min(int(available_bytes(device) * _CPU_SHARE), _CPU_LIMIT)
    return int(available_bytes(device) * _GPU_SHARE)


def available_bytes(device: torch.device) -> int:
    """Memory that could be allocated now without swapping, within the limit of a container."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    machine = int(psutil.virtual_memory().available)
    container = container_bytes(_CGROUP)
    return machine if container is None else min(machine, container)


def container_bytes(cgroup: Path) -> int | None:
    """What the container's limit leaves (cgroup v2, its page cache counted as free); ``None`` without a limit."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((cgroup / "memory.current").read_text())
        statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return max(0, int(limit) - used + int(statistics.get("inactive_file", 0)))
