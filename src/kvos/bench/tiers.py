"""What tiers cost and save: speeds there and back, and sessions on a pool too small for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvos.bench.moves import MoveRow, measure_disk, measure_host
from kvos.bench.workload import Turns, WorkloadRow, measure_workload
from kvos.bench.workplace import open_workplace
from kvos.config import KvosConfig
from kvos.errors import InvalidInputError
from kvos.runtime import DEFAULT_MODEL

__all__ = ["TiersReport", "bench_tiers"]


@dataclass(frozen=True, slots=True)
class TiersReport:
    """What ``kvos bench tiers`` found, and on what."""

    model: str
    dtype: str
    device: str
    torch_threads: int
    moves: tuple[MoveRow, ...]
    workloads: tuple[WorkloadRow, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def bench_tiers(
    model: str = DEFAULT_MODEL,
    *,
    tokens: int = 4096,
    turns: Turns | None = None,
    rounds: int | None = None,
    config: KvosConfig | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> TiersReport:
    """Measure; takes two or three minutes on two CPU cores. Works in a folder of its own in ``config.home``.

    Args:
        tokens: how many move between device and tier at once.
        turns: the workload of many sessions.
        rounds: of each pair of measurements; by default 7 of moves and 3 of workloads.
        progress: told what is being measured.

    Raises:
        InvalidInputError: fewer than one block's tokens, or more than the model's context.
        ServerError: a tier did not work; the log says why.
    """
    config = KvosConfig.from_env() if config is None else config
    if tokens < config.block_size:
        raise InvalidInputError(f"--tokens is {tokens}; expected at least one block, {config.block_size} tokens")
    progress("loading the model")
    with open_workplace(model, config) as place:
        given = {} if rounds is None else {"rounds": rounds}
        progress(f"{tokens} tokens to host memory and back")
        moves = [measure_host(place, tokens, **given)]
        progress(f"{tokens} tokens to disk and back")
        moves.append(measure_disk(place, tokens, **given))
        chosen = Turns(block_size=place.layout.block_size) if turns is None else turns
        workloads = measure_workload(place, chosen, progress=progress, **given)
        return TiersReport(
            model=place.loaded.name,
            dtype=str(place.loaded.dtype).removeprefix("torch."),
            device=str(place.loaded.device),
            torch_threads=torch.get_num_threads(),
            moves=tuple(moves),
            workloads=workloads,
        )
