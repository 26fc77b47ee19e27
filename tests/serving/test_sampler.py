"""Tokens are chosen as Transformers' own ``generate`` chooses them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from kvos.errors import EngineContractError
from kvos.serving import SamplingParams
from kvos.serving.sampler import SamplingState, sample
from serving.harness import Bench, plain_greedy, reference, some_ids

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.0, "repetition_penalty": 1.7},
    {"temperature": 1.4, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2},
]
VOCAB = 50
HISTORY = np.array([1, 1, 4, 30, 49], np.int32)


def logits_of(seed: int) -> torch.Tensor:
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3


def library_probabilities(settings: dict[str, Any], logits: torch.Tensor) -> torch.Tensor:
    """What ``generate`` would draw from, through the processors that it would make itself."""
    config = GenerationConfig(do_sample=True, **{"top_k": 0, **settings})
    processors = reference()._get_logits_processor(config, input_ids_seq_length=len(HISTORY), device="cpu")
    return processors(torch.from_numpy(HISTORY).long()[None], logits.clone()).softmax(-1)[0]


def draw(logits: torch.Tensor, **settings: Any) -> int:
    return sample(logits, [SamplingState.start(SamplingParams(**settings))], [HISTORY])[0]


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_distribution_is_that_of_the_library(settings: dict[str, Any]) -> None:
    logits = logits_of(0)
    expected = library_probabilities(settings, logits)
    for seed in range(100):
        wanted = torch.multinomial(expected, 1, generator=torch.Generator().manual_seed(seed))
        assert draw(logits, **settings, seed=seed) == int(wanted)


@pytest.mark.parametrize("settings", SETTINGS)
def test_nothing_is_drawn_from_outside_the_support_and_all_of_it_is_drawn(settings: dict[str, Any]) -> None:
    logits = logits_of(1)
    expected = library_probabilities(settings, logits)
    drawn = Counter(draw(logits, **settings, seed=seed) for seed in range(600))
    assert all(expected[token] > 0 for token in drawn)
    assert all(token in drawn for token in range(VOCAB) if expected[token] > 0.02)
    # Chi-square over the likely tokens, the rest in one class; seeds are fixed, so this never fails by chance.
    classes = [int(i) for i in range(VOCAB) if expected[i] * 600 >= 5]
    wanted = [float(expected[i]) * 600 for i in classes]
    seen = [drawn[i] for i in classes]
    rest = 600 - sum(wanted)
    chi = sum((s - w) ** 2 / w for s, w in zip(seen, wanted, strict=True))
    chi += (600 - sum(seen) - rest) ** 2 / rest if rest > 5 else 0
    freedom = len(classes)
    assert chi < freedom + 4 * (2 * freedom) ** 0.5 + 4


def test_greedy_takes_the_likeliest_token() -> None:
    for seed in range(20):
        assert draw(logits_of(seed)) == int(logits_of(seed).argmax())


def test_greedy_heeds_the_repetition_penalty() -> None:
    logits = torch.zeros(1, VOCAB, dtype=torch.float64)
    logits[0, 30], logits[0, 7] = 2.0, 1.5
    assert draw(logits) == 30
    assert draw(logits, repetition_penalty=2.0) == 7  # 30 is in the history: 2.0 / 2 < 1.5


@pytest.mark.parametrize("temperature", [1e-320, 1e-60, 1e-30, 1e-9, 1e-6, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_temperature_near_zero_is_greedy_and_not_an_overflow(temperature: float, dtype: torch.dtype) -> None:
    logits = logits_of(3).to(dtype)
    assert draw(logits, temperature=temperature, seed=1) == int(logits.argmax())


def test_rows_with_different_settings_are_drawn_as_if_alone() -> None:
    rows = [(logits_of(seed), SETTINGS[seed % len(SETTINGS)], seed) for seed in range(16)] + [(logits_of(99), {}, 0)]
    states = [SamplingState.start(SamplingParams(**settings, seed=seed)) for _, settings, seed in rows]
    together = sample(torch.cat([logits for logits, _, _ in rows]), states, [HISTORY] * len(rows))
    alone = [draw(logits, **settings, seed=seed) for logits, settings, seed in rows]
    assert together == alone


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_an_error(bad: float) -> None:
    logits = logits_of(0)
    logits[0, 5] = bad
    with pytest.raises(EngineContractError, match="not finite"):
        draw(logits)


@pytest.mark.parametrize("settings", [SETTINGS[0], SETTINGS[3], SETTINGS[-1]])
def test_a_seeded_reply_is_the_one_that_generate_gives(settings: dict[str, Any]) -> None:
    ids = some_ids(30)
    torch.manual_seed(11)
    expected = reference().generate(
        torch.tensor([ids]),
        do_sample=True,
        max_new_tokens=12,
        pad_token_id=0,
        eos_token_id=2,
        **{"top_k": 0, **settings},
    )[0, len(ids) :]
    bench = Bench()
    assert list(bench.reply(bench.raw(ids), max_tokens=12, seed=11, **settings).tokens) == expected.tolist()


def test_a_greedy_reply_is_that_of_a_plain_model() -> None:
    bench = Bench()
    assert list(bench.reply(bench.raw(some_ids(30)), max_tokens=15).tokens) == plain_greedy(some_ids(30), 15, [2])


def test_a_seeded_reply_does_not_depend_on_who_else_is_served() -> None:
    settings = {"max_tokens": 15, "temperature": 1.3, "seed": 5, "top_p": 0.95}
    alone = Bench()
    expected = alone.reply(alone.raw(some_ids(20)), **settings).tokens
    crowded = Bench()
    others = [crowded.generate(crowded.raw(some_ids(9 + n, n)), max_tokens=30, temperature=1.0) for n in range(4)]
    crowded.step()
    crowded.step()
    mine = crowded.generate(crowded.raw(some_ids(20)), **settings)
    crowded.run()
    assert mine.finished.tokens == expected
    assert all(other.is_over for other in others)


def test_unseeded_replies_differ() -> None:
    bench = Bench()
    session = bench.raw(some_ids(20))
    replies = set()
    for _ in range(3):
        replies.add(bench.reply(session, max_tokens=10, temperature=2.0, ignore_eos=True).tokens)
        bench.handle(session).truncate(tokens=20)
    assert len(replies) == 3


def test_one_bad_row_of_logits_fails_one_request() -> None:
    bench = Bench()
    good, bad = bench.raw(some_ids(12), "good"), bench.raw(some_ids(20, 1), "bad")
    forward = bench.engine.forward

    def spoiled(batch: Any) -> torch.Tensor:
        logits = forward(batch).clone()
        logits[torch.from_numpy(batch.context_lengths == 20)] = float("nan")
        return logits

    bench.engine.forward = spoiled  # type: ignore[method-assign]
    ends = [bench.generate(session, max_tokens=5) for session in (bad, good)]
    bench.run()
    assert isinstance(ends[0].error, EngineContractError)
    assert list(ends[1].finished.tokens) == plain_greedy(some_ids(12), 5, [2])
