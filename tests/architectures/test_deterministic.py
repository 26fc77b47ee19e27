"""Batch-invariant mode: bits, not tolerances."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import kvos
from architectures.families import FAMILIES
from engine.driver import Driver, History, Work
from kvos.engine import TransformersEngine
from kvos.engine.kernels import Kernels
from kvos.errors import InvalidConfigError, UnsupportedModelError
from kvos.models.architectures import ARCHITECTURES, Need
from kvos.serving import WhyComputed
from kvos.testing import toy_model, toy_tokenizer
from kvos.verify import run_verify

DTYPES = [torch.float32, torch.bfloat16]
DENSE = [name for name, one in FAMILIES.items() if Need.EXPERTS not in ARCHITECTURES[one.model_type].needs]


def alone(driver: Driver, history: History) -> torch.Tensor:
    """All tokens in one piece, with nothing beside them, in blocks of its own."""
    fresh = History(history.ids, driver.history(len(history.ids)).table)
    return driver.prefill(fresh)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", DENSE)
def test_bits_depend_on_the_tokens_alone(name: str, dtype: torch.dtype) -> None:
    driver = Driver(TransformersEngine(FAMILIES[name].model(dtype), deterministic=True), blocks=90, declared=150)
    histories = [driver.history(tokens) for tokens in (75, 40, 66, 13)]
    expected = [alone(driver, history) for history in histories]
    parts: list[list[torch.Tensor]] = [[] for _ in histories]
    rng = np.random.default_rng(1)
    while running := [n for n, history in enumerate(histories) if history.computed < len(history.ids)]:
        chosen = [n for n in running if rng.random() < 0.7] or running[:1]
        rows = [min(int(rng.choice([1, 1, 5, 16, 33])), len(histories[n].ids) - histories[n].computed) for n in chosen]
        for n, part in zip(chosen, driver.step(*map(Work, [histories[n] for n in chosen], rows)), strict=True):
            parts[n].append(part)
    for mine, wanted in zip(parts, expected, strict=True):
        assert torch.equal(torch.cat(mine), wanted)


def test_without_the_mode_bits_do_depend_on_the_batch() -> None:
    driver = Driver(TransformersEngine(FAMILIES["llama"].model()), blocks=90)
    history = driver.history(75)
    assert not torch.equal(driver.prefill(history, 5, 16, 1, 33), alone(driver, history))


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_histories_hit_to_the_bit(dtype: torch.dtype, rounds: Callable[[int, int], int]) -> None:
    report = run_verify(toy_model(dtype=dtype), tokenizer=toy_tokenizer(), rounds=rounds(6, 100), bitwise=True, seed=2)
    assert report.ok, report.mismatch
    assert report.tally.largest_difference == 0
    assert report.tally.tokens_skipped == 0
    assert report.counters["tokens_shared"] > 0


def test_a_difference_of_one_bit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = TransformersEngine.forward

    def nearly(engine: TransformersEngine, batch: object) -> torch.Tensor:
        logits = forward(engine, batch).clone()  # type: ignore[arg-type]
        rows = np.diff(batch.query_starts)  # type: ignore[attr-defined]
        if len(logits) and batch.context_lengths[0] > rows[0]:  # type: ignore[attr-defined]  # fresh runs have no past
            logits[0, 0] = torch.nextafter(logits[0, 0], torch.tensor(torch.inf))
        return logits

    monkeypatch.setattr(TransformersEngine, "forward", nearly)
    report = run_verify(toy_model(), tokenizer=toy_tokenizer(), rounds=10, bitwise=True, seed=2, max_trials=0)
    assert not report.ok
    assert report.mismatch is not None
    assert "bit by bit" in report.mismatch.text


def test_a_sampled_reply_does_not_depend_on_who_else_is_served(tmp_path: Path) -> None:
    with kvos.open(toy_model(), tokenizer=toy_tokenizer(), home=tmp_path, deterministic=True) as runtime:
        texts = []
        for others in (0, 5):
            crowd = [runtime.session() for _ in range(others)]
            for number, session in enumerate(crowd):
                session.append_tokens([5 + number] * (3 + 7 * number))
            replies = [session.generate(max_tokens=30, ignore_eos=True) for session in crowd]
            mine = runtime.session(tenant=f"t{others}")
            mine.append_tokens([9, 8, 7] * 9)
            texts.append(mine.generate(max_tokens=25, temperature=1.0, seed=4, ignore_eos=True).result().tokens)
            for reply in replies:
                reply.result()
        assert texts[0] == texts[1]


def test_keys_from_other_arithmetic_are_computed_anew(tmp_path: Path) -> None:
    file = tmp_path / "x.kvos"
    with kvos.open(toy_model(), tokenizer=toy_tokenizer(), home=tmp_path) as runtime:
        session = runtime.session()
        session.append_tokens([5] * 40)
        session.prefill()
        session.save(file)
    with kvos.open(toy_model(), tokenizer=toy_tokenizer(), home=tmp_path, deterministic=True) as runtime:
        back = runtime.load(file)
        assert back.prefill().why_computed is WhyComputed.SAVED_KV_UNUSABLE
        back.save(file)
    with kvos.open(toy_model(), tokenizer=toy_tokenizer(), home=tmp_path, deterministic=True) as runtime:
        assert runtime.load(file).report().pending == 0


def test_what_cannot_be_promised_is_refused() -> None:
    for name in set(FAMILIES) - set(DENSE):
        with pytest.raises(UnsupportedModelError, match="mixture of experts"):
            TransformersEngine(FAMILIES[name].model(), deterministic=True)
    with pytest.raises(InvalidConfigError, match="numba"):
        TransformersEngine(toy_model(), deterministic=True, kernels=Kernels(attention="numba"))
