"""Batch-invariant mode: bits, not tolerances."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvos
from architectures.families import FAMILIES
from engine.driver import Driver, History, Work
from kvos.config import KvosConfig
from kvos.engine import PackedBatch, TransformersEngine
from kvos.engine.batch_invariance import row_by_row
from kvos.engine.kernels import Kernels
from kvos.errors import EngineContractError, InvalidConfigError, UnsupportedModelError
from kvos.models.architectures import ARCHITECTURES, Need
from kvos.serving import WhyComputed
from kvos.storage import BlockPool
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


@pytest.mark.parametrize("threads", [3, 5, 8])
def test_bits_do_not_depend_on_where_threads_share_the_work(threads: int) -> None:
    """A vectorised function computes the end of each thread's share by other code than the rest."""
    torch.set_num_threads(threads)
    model = FAMILIES["llama"].model(intermediate_size=1536, num_hidden_layers=2)
    driver = Driver(TransformersEngine(model, deterministic=True), blocks=200, declared=600)
    for tokens in (88, 104, 130, 144):
        history = driver.history(tokens)
        assert torch.equal(driver.prefill(history, *[40] * 4), alone(driver, history))


def test_an_activation_has_the_same_bits_in_a_batch_of_any_size() -> None:
    torch.set_num_threads(8)
    rows = torch.randn(88, 1536, generator=torch.Generator().manual_seed(0))
    with row_by_row():
        for function in (torch.nn.functional.silu, torch.tanh, torch.cos):
            assert torch.equal(function(rows), torch.cat([function(part) for part in rows.split(8)]))


def test_powers_mean_the_same_row_by_row() -> None:
    rows = torch.rand(5, 7, generator=torch.Generator().manual_seed(0)) + 0.5
    with row_by_row():
        for base, exponent in ((rows, 1.7), (rows, 2), (rows, rows), (2.0, rows)):
            assert torch.allclose(torch.pow(base, exponent), torch.exp(torch.log(torch.as_tensor(base)) * exponent))


def test_a_machine_whose_bits_differ_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = TransformersEngine._run

    def nearly(engine: TransformersEngine, batch: PackedBatch, pool: BlockPool) -> torch.Tensor:
        logits = run(engine, batch, pool).clone()
        return logits + 1e-6 * (batch.num_sequences > 1) * logits

    monkeypatch.setattr(TransformersEngine, "_run", nearly)
    with pytest.raises(EngineContractError, match="does not give the same bits"):
        TransformersEngine(toy_model(), deterministic=True)


def test_a_hit_in_another_process_equals_a_recompute_there_to_the_bit(tmp_path: Path) -> None:
    program = (
        "import sys, kvos, torch; from kvos.testing import toy_model, toy_tokenizer\n"
        "home, mode = sys.argv[1:]\n"
        "with kvos.open(toy_model(), tokenizer=toy_tokenizer(), home=home, deterministic=True) as runtime:\n"
        "    if mode == 'load':\n"
        "        session = runtime.load('x'); assert session.report().pending == 0\n"
        "    else:\n"
        "        session = runtime.session(); session.append_tokens(list(range(5, 75))); session.prefill()\n"
        "    if mode == 'save': session.save('x')\n"
        "    print(session.score([9, 8, 7]).view(torch.int32).tolist())\n"
    )
    out = {}
    for mode in ("save", "load", "fresh"):
        command = [sys.executable, "-c", program, str(tmp_path), mode]
        out[mode] = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert out["save"] == out["load"] == out["fresh"]


@pytest.mark.parametrize("settings", [{"kernels": "generic"}, {"max_context_tokens": 100}])
def test_verification_takes_the_settings_of_the_config(settings: dict[str, Any]) -> None:
    config = KvosConfig.from_env(**settings)
    report = run_verify(toy_model(), tokenizer=toy_tokenizer(), config=config, rounds=2, bitwise=True)
    assert report.ok, report.mismatch


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
