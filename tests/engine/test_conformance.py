"""Every engine and every kernel gives what the plain model gives without a cache, whatever the batch looks like."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from engine.driver import Driver, History, Work, plain_logits
from kvos.engine import DynamicCacheEngine, Engine, TransformersEngine
from kvos.engine.kernels import Kernels
from kvos.engine.plan import TILE_ROWS
from kvos.storage import BLOCK_SIZES
from kvos.testing import toy_model

VARIANTS: dict[str, tuple[torch.dtype, Kernels | None]] = {
    "generic-fp64": (torch.float64, Kernels("generic", "plain", "plain")),
    "generic-fp32": (torch.float32, Kernels("generic", "plain", "plain")),
    "generic-bf16": (torch.bfloat16, Kernels("generic", "plain", "plain")),
    "packed-linears-fp32": (torch.float32, Kernels("generic", "packed", "plain")),
    "numba-fp32": (torch.float32, Kernels("numba", "plain", "plain")),
    "auto-fp32": (torch.float32, Kernels()),
    "dynamic-cache-fp64": (torch.float64, None),
    "dynamic-cache-fp32": (torch.float32, None),
}
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.25}
"""Of the largest logit. The library's norms compute in float32 inside, also in a float64 model."""

Build = Callable[..., tuple[Engine, "Check"]]


class Check:
    """Compares with a model object of the same weights that no engine touches."""

    def __init__(self, dtype: torch.dtype, **overrides: Any) -> None:
        self.model = toy_model(dtype=dtype, **overrides)
        self.tolerance = TOLERANCE[dtype]

    def __call__(self, history: History, logits: torch.Tensor, start: int = 0) -> None:
        expected = plain_logits(self.model, history.ids)[start : start + len(logits)]
        assert logits.shape == expected.shape
        assert torch.isfinite(logits).all()
        assert (logits - expected).abs().max() <= self.tolerance * expected.abs().max()


@pytest.fixture(params=VARIANTS)
def build(request: pytest.FixtureRequest) -> Iterator[Build]:
    """``build(block_size=..., **model settings)`` makes the engine of this variant and what checks it."""
    dtype, kernels = VARIANTS[request.param]
    if kernels is not None and kernels.attention == "numba":
        pytest.importorskip("numba")
    engines: list[Engine] = []

    def make(block_size: int = 16, **overrides: Any) -> tuple[Engine, Check]:
        model = toy_model(dtype=dtype, **overrides)
        if kernels is None:
            engines.append(DynamicCacheEngine(model, block_size=block_size))
        else:
            engines.append(TransformersEngine(model, block_size=block_size, kernels=kernels))
        return engines[-1], Check(dtype, **overrides)

    yield make
    for engine in engines:
        engine.close()


def test_a_prompt_in_one_piece(build: Build) -> None:
    engine, check = build()
    driver = Driver(engine)
    history = driver.history(45)
    check(history, driver.prefill(history))


def test_a_single_token(build: Build) -> None:
    engine, check = build()
    driver = Driver(engine)
    history = driver.history(1)
    check(history, driver.prefill(history))


def test_a_prompt_in_random_chunks_and_single_tokens(build: Build) -> None:
    engine, check = build()
    driver = Driver(engine, seed=1)
    history = driver.history(90)
    chunks = [int(size) for size in driver.rng.integers(1, 12, 30)]
    check(history, driver.prefill(history, *chunks))


def test_a_chunk_longer_than_a_mask_tile_behind_a_past(build: Build) -> None:
    engine, check = build()
    driver = Driver(engine)
    history = driver.history(2 * TILE_ROWS + 100)
    check(history, driver.prefill(history, 37))


@pytest.mark.parametrize("blocks_per_segment", [60, 7])
def test_mixed_prefills_and_decodes_of_many_sequences(build: Build, blocks_per_segment: int) -> None:
    engine, check = build()
    driver = Driver(engine, blocks_per_segment=blocks_per_segment, seed=2)
    histories = [driver.history(int(tokens)) for tokens in (3, 100, 17, 64, 150, 1)]
    logits: list[list[torch.Tensor]] = [[] for _ in histories]
    while open_ones := [i for i, history in enumerate(histories) if history.computed < len(history.ids)]:
        chosen = driver.rng.permutation(open_ones)[: driver.rng.integers(1, len(open_ones) + 1)]
        left = [len(histories[i].ids) - histories[i].computed for i in chosen]
        rows = [1 if driver.rng.random() < 0.5 else int(driver.rng.integers(1, min(n, 30) + 1)) for n in left]
        for i, part in zip(chosen, driver.step(*map(Work, [histories[i] for i in chosen], rows)), strict=True):
            logits[i].append(part)
    for history, parts in zip(histories, logits, strict=True):
        check(history, torch.cat(parts))


def test_sequences_that_share_prefix_blocks(build: Build) -> None:
    engine, check = build()
    driver = Driver(engine)
    parent = driver.history(40)
    check(parent, driver.prefill(parent))
    forks = [driver.history(tokens, prefix=parent) for tokens in (33, 50, 41)]
    assert all(fork.computed == 32 for fork in forks)
    for fork, part in zip(forks, driver.step(*(Work(fork, len(fork.ids) - 32) for fork in forks)), strict=True):
        check(fork, part, start=32)


def test_a_row_that_is_computed_but_not_stored(build: Build) -> None:
    engine, check = build()
    driver = Driver(engine)
    hit, other, alone = driver.history(32), driver.history(20), driver.history(1)
    for history in (hit, other, alone):
        driver.prefill(history, *([] if history is not other else [19]))
    other.computed -= 5
    before = [tensor.clone() for segment in driver.pool.segments for tensor in (*segment.keys, *segment.values)]
    first, last, one = driver.step(Work(hit, 1, write=False), Work(other, 2), Work(alone, 1, write=False))
    check(hit, first, start=31)
    check(other, last, start=15)
    check(alone, one)
    after = [tensor for segment in driver.pool.segments for tensor in (*segment.keys, *segment.values)]
    for history in (hit, alone):
        own = torch.from_numpy(history.table)
        for old, new in zip(before, after, strict=True):
            assert torch.equal(old[own].nan_to_num(7.0), new[own].nan_to_num(7.0))


def test_several_rows_that_are_computed_but_not_stored(build: Build) -> None:
    engine, check = build()
    driver = Driver(engine)
    history = driver.history(30)
    driver.prefill(history)
    check(history, driver.step(Work(history, 30, write=False))[0])
    check(history, driver.step(Work(history, 4, write=False))[0], start=26)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_every_block_size(build: Build, block_size: int) -> None:
    engine, check = build(block_size=block_size)
    driver = Driver(engine, blocks_per_segment=23)
    long, short = driver.history(140), driver.history(70)
    for history, part in zip((long, short), driver.step(Work(long, 139), Work(short, 69)), strict=True):
        check(history, part)
    for history, part in zip((long, short), driver.step(Work(long, 1), Work(short, 1)), strict=True):
        check(history, part, start=history.computed - 1)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 16), (8, 1, 8), (8, 2, 20)])
def test_every_ratio_of_query_heads_to_kv_heads(build: Build, heads: int, kv_heads: int, head_dim: int) -> None:
    engine, check = build(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim)
    driver = Driver(engine)
    history = driver.history(75)
    check(history, driver.prefill(history, 40, 1, 30, 1, 1))


@pytest.mark.parametrize("rope", ["linear", "yarn", "llama3"])
def test_position_schemes_whose_keys_depend_on_their_own_position_only(build: Build, rope: str) -> None:
    parameters: dict[str, Any] = {"rope_type": rope, "rope_theta": 10000.0, "factor": 4.0}
    if rope != "linear":
        parameters["original_max_position_embeddings"] = 64
    if rope == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    engine, check = build(rope_parameters=parameters)
    driver = Driver(engine)
    history = driver.history(100)
    check(history, driver.prefill(history, 70, 1, 5))


def test_a_pool_that_grows_between_steps(build: Build) -> None:
    engine, check = build()
    driver = Driver(engine, blocks=6, blocks_per_segment=3)
    history = driver.history(40)
    parts = [driver.step(Work(history, 30))[0]]
    driver.pool.max_blocks = 9
    driver.grow()
    history.table[2] = 8
    parts += [driver.step(Work(history, rows))[0] for rows in (1, 1, 8)]
    check(history, torch.cat(parts))


def test_only_the_wanted_rows_have_logits(build: Build) -> None:
    engine, check = build()
    driver = Driver(engine)
    a, b = driver.history(10), driver.history(6)
    logits = engine.forward(driver.batch([Work(a, 10), Work(b, 6)], logit_rows=np.array([9, 12, 15])))
    check(a, logits[:1], start=9)
    check(b, logits[1:2], start=2)
    check(b, logits[2:], start=5)


def test_no_row_has_to_have_logits(build: Build) -> None:
    engine, check = build()
    driver = Driver(engine)
    history = driver.history(12)
    logits = engine.forward(driver.batch([Work(history, 8)], logit_rows=np.array([], dtype=np.int64)))
    assert logits.shape == (0, engine.info.vocab_size)
    history.computed = 8
    check(history, driver.prefill(history), start=8)


def test_logits_are_at_least_float32(build: Build) -> None:
    engine, _ = build()
    driver = Driver(engine)
    wide = torch.float64 if engine.info.compute_dtype == torch.float64 else torch.float32
    assert driver.prefill(driver.history(3)).dtype == wide


def test_tied_embeddings_and_biases(build: Build) -> None:
    engine, check = build(tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    driver = Driver(engine)
    history = driver.history(50)
    check(history, driver.prefill(history, 20, 1))
