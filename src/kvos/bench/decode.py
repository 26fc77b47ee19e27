"""Time of a decode step and speed of prefill: kvos and plain Transformers, in turn, in one run.

The two take turns in short rounds, so that a machine whose speed drifts slows both alike; medians are compared.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from kvos.bench.plain import PlainDecoder, plain_prefill_seconds
from kvos.config import KvosConfig
from kvos.errors import InvalidInputError
from kvos.models.load import load_model
from kvos.runtime import DEFAULT_MODEL, Runtime, open_runtime
from kvos.serving import EngineCore, SamplingParams

__all__ = ["DecodeReport", "PrefillRow", "StepRow", "bench_decode"]

ROUNDS = 6
STEPS_PER_ROUND = 8
WARM_UP_STEPS = 4
PREFILL_ROUNDS = 3
PREFILL_TOKENS = (512, 2048)


@dataclass(frozen=True, slots=True)
class StepRow:
    """One decode step of ``sequences`` sequences, in milliseconds; medians.

    Attributes:
        kvos_model_ms: of kvos's step, the part inside the model's forward.
        overhead: share of kvos's step outside the model.
    """

    sequences: int
    tokens: int
    kvos_ms: float
    kvos_model_ms: float
    plain_ms: float

    @property
    def overhead(self) -> float:
        return 1 - self.kvos_model_ms / self.kvos_ms

    @property
    def speed_up(self) -> float:
        return self.plain_ms / self.kvos_ms


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """Prefill of one prompt, in tokens per second; medians."""

    tokens: int
    kvos_tokens_per_s: float
    plain_tokens_per_s: float

    @property
    def speed_up(self) -> float:
        return self.kvos_tokens_per_s / self.plain_tokens_per_s


@dataclass(frozen=True, slots=True)
class DecodeReport:
    """What ``kvos bench decode`` found, and on what."""

    model: str
    dtype: str
    device: str
    torch_threads: int
    deterministic: bool
    steps: tuple[StepRow, ...]
    prefill: tuple[PrefillRow, ...]

    def as_dict(self) -> dict[str, Any]:
        data = asdict(self)
        data["steps"] = [{**asdict(r), "overhead": r.overhead, "speed_up": r.speed_up} for r in self.steps]
        data["prefill"] = [{**asdict(r), "speed_up": r.speed_up} for r in self.prefill]
        return data


def bench_decode(
    model: str = DEFAULT_MODEL,
    *,
    sequences: Sequence[int] = (1, 4, 8),
    tokens: int = 600,
    prefill_tokens: Sequence[int] = PREFILL_TOKENS,
    config: KvosConfig | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> DecodeReport:
    """Measure; takes a minute or two on two CPU cores.

    Args:
        sequences: numbers of sequences in a step.
        tokens: history of each sequence, all different.
        prefill_tokens: lengths of prompts; those beyond the model's context are left out.
        progress: told what is being measured.

    Raises:
        InvalidInputError: sizes below one, or longer than the model's context.
    """
    if not sequences or min(*sequences, tokens, *prefill_tokens) < 1:
        raise InvalidInputError("numbers of sequences and tokens are whole numbers from 1")
    config = replace(KvosConfig.from_env() if config is None else config, disk_cache_bytes=0)
    progress("loading the model")
    loaded = load_model(model, config=config)
    plain = copy.deepcopy(loaded.model)  # kvos packs the weights of the other one
    steps: list[StepRow] = []
    prefill: list[PrefillRow] = []
    with open_runtime(loaded.model, tokenizer=loaded.tokenizer, config=config) as runtime:
        room = ROUNDS * STEPS_PER_ROUND + WARM_UP_STEPS + 1
        longest = runtime.max_context_tokens
        if tokens + room > longest:
            raise InvalidInputError(
                f"the context is {longest} tokens; {room} steps behind {tokens} tokens need {tokens + room}"
            )
        prefill_tokens = [length for length in prefill_tokens if length <= longest]
        clock = _ModelClock(loaded.model)
        for n in sequences:
            progress(f"decode steps of {n} sequences of {tokens} tokens")
            steps.append(_steps(runtime, plain, clock, _prompts(runtime, n, tokens)))
        for length in prefill_tokens:
            progress(f"prefill of {length} tokens")
            prefill.append(_prefill(runtime, plain, length))
        clock.remove()
    return DecodeReport(
        model=loaded.name,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
        torch_threads=torch.get_num_threads(),
        deterministic=config.deterministic,
        steps=tuple(steps),
        prefill=tuple(prefill),
    )


class _ModelClock:
    """Adds up the time inside a model's forward."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.seconds = 0.0
        self._begin = 0.0
        self._hooks = (
            model.register_forward_pre_hook(lambda *_: self._enter()),
            model.register_forward_hook(lambda *_: self._leave()),
        )

    def _enter(self) -> None:
        self._begin = time.perf_counter()

    def _leave(self) -> None:
        self.seconds += time.perf_counter() - self._begin

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _prompts(runtime: Runtime, n: int, tokens: int) -> npt.NDArray[np.int64]:
    """``[n, tokens]`` random token ids, so that nothing is shared."""
    vocabulary = runtime.inspect(lambda core: core.engine.info.vocab_size)
    return np.random.default_rng(n).integers(0, vocabulary, (n, tokens))


def _steps(runtime: Runtime, plain: PreTrainedModel, clock: _ModelClock, prompts: npt.NDArray[np.int64]) -> StepRow:
    n, tokens = prompts.shape
    sessions = [runtime.session() for _ in range(n)]
    try:
        for session, prompt in zip(sessions, prompts, strict=True):
            session.append_tokens(prompt)
            session.prefill()
        names = [session.name for session in sessions]
        decoder = PlainDecoder.start(plain, torch.from_numpy(prompts))
        # All on the engine thread, so that it does nothing else meanwhile.
        timings = runtime.inspect(lambda core: _take_turns(core, names, decoder, clock))
    finally:
        for session in sessions:
            session.close()
    return StepRow(n, tokens, *(1000 * median(seconds) for seconds in timings))


def _take_turns(
    core: EngineCore, names: Sequence[str], decoder: PlainDecoder, clock: _ModelClock
) -> tuple[list[float], list[float], list[float]]:
    """Seconds per step: of kvos, of the model inside that, of plain Transformers."""
    params = SamplingParams(ignore_eos=True)
    for name in names:
        core.generate(core.sessions.get(name), params, lambda _: None)
    _kvos_steps(core, clock, WARM_UP_STEPS)
    decoder.step_seconds(WARM_UP_STEPS)
    kvos: list[float] = []
    inside: list[float] = []
    plain: list[float] = []
    for _ in range(ROUNDS):
        steps, model = _kvos_steps(core, clock, STEPS_PER_ROUND)
        kvos += steps
        inside += model
        plain += decoder.step_seconds(STEPS_PER_ROUND)
    return kvos, inside, plain


def _kvos_steps(core: EngineCore, clock: _ModelClock, steps: int) -> tuple[list[float], list[float]]:
    seconds: list[float] = []
    inside: list[float] = []
    for _ in range(steps):
        clock.seconds = 0.0
        begin = time.perf_counter()
        core.step()
        seconds.append(time.perf_counter() - begin)
        inside.append(clock.seconds)
    return seconds, inside


def _prefill(runtime: Runtime, plain: PreTrainedModel, length: int) -> PrefillRow:
    kvos: list[float] = []
    other: list[float] = []
    for prompt in _prompts(runtime, PREFILL_ROUNDS, length):
        session = runtime.session()
        session.append_tokens(prompt)
        begin = time.perf_counter()
        session.prefill()
        kvos.append(time.perf_counter() - begin)
        session.close()
        other.append(plain_prefill_seconds(plain, torch.from_numpy(prompt)[None]))
    return PrefillRow(length, length / median(kvos), length / median(other))
