"""RoPE that looks at the length: each session has the positions of the length that it declared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import kvos
from architectures.families import FAMILIES, Family
from engine.driver import Driver, Work
from kvos.engine import DynamicCacheEngine, TransformersEngine
from kvos.engine.identity import model_identity
from kvos.errors import EngineContractError, InvalidInputError, UnsupportedModelError
from kvos.testing import toy_tokenizer

NAMES = ["llama-dynamic", "llama-longrope", "phi3-longrope"]
SHORT, LONG = 40, 150


@pytest.fixture(params=NAMES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


def plain_of_exactly(family: Family, ids: list[int], total: int) -> torch.Tensor:
    """Untouched Transformers, eager, on a sequence of ``total`` tokens: there it takes the length that was declared.

    A causal model's rows for ``ids`` do not depend on what comes behind them, but for that length.
    """
    model = family.model(torch.float64)
    model.set_attn_implementation("eager")
    padded = [*ids, *[7] * (total - len(ids))]
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([padded]), use_cache=False).logits[0, : len(ids)]
    return logits


def close(logits: torch.Tensor, expected: torch.Tensor, tolerance: float = 5e-6) -> bool:
    return bool((logits - expected).abs().max() <= tolerance * expected.abs().max())


def ids_of(n: int, seed: int = 0) -> list[int]:
    numbers: list[int] = np.random.default_rng(seed).integers(3, 259, n).tolist()
    return numbers


def test_a_session_has_the_positions_of_its_declared_length(family: Family) -> None:
    ids = ids_of(30)
    with kvos.open(family.model(torch.float64), tokenizer=toy_tokenizer(), block_size=8) as runtime:
        for total in (SHORT, LONG):
            session = runtime.session(max_tokens=total)
            logits = torch.cat([session.score(ids[:11]), session.score(ids[11:12]), session.score(ids[12:])])
            assert close(logits, plain_of_exactly(family, ids, total))
            assert not close(logits, plain_of_exactly(family, ids, LONG + SHORT - total), 1e-3)
        assert runtime.stats().counters["tokens_shared"] == 0  # equal text, other positions


def test_neighbours_of_other_lengths_change_nothing(family: Family) -> None:
    engine = TransformersEngine(family.model(torch.float64))
    driver = Driver(engine)
    short, long = driver.history(35), driver.history(120)
    parts: dict[int, list[torch.Tensor]] = {SHORT: [], LONG: []}
    for rows in (20, 10, 1, 1, 1):
        work = [Work(short, rows), Work(long, rows)]
        batch = driver.batch(work)
        object.__setattr__(batch, "declared_lengths", np.array([SHORT, LONG]))
        first, second = engine.forward(batch).split([rows, rows])
        parts[SHORT].append(first)
        parts[LONG].append(second)
        short.computed += rows
        long.computed += rows
    for history, total in ((short, SHORT), (long, LONG)):
        expected = plain_of_exactly(family, history.ids.tolist(), max(total, len(history.ids)))
        assert close(torch.cat(parts[total]), expected[:33])


def test_sessions_of_one_length_share_and_forks_keep_it(family: Family) -> None:
    ids = ids_of(30, 1)
    with kvos.open(family.model(torch.float64), tokenizer=toy_tokenizer(), block_size=8) as runtime:
        first, second = runtime.session(max_tokens=LONG), runtime.session(max_tokens=LONG)
        first.append_tokens(ids)
        first.prefill()
        second.append_tokens(ids)
        assert second.prefill().shared_tokens == 24
        (child,) = second.fork()
        assert close(child.score([9]), plain_of_exactly(family, [*ids, 9], LONG)[-1:])
        with pytest.raises(kvos.errors.ContextLengthExceededError, match=str(LONG)):
            child.append_tokens([5] * LONG)


def test_a_saved_session_keeps_its_length_whatever_the_next_runtime_allows(family: Family, tmp_path: Path) -> None:
    ids = ids_of(30, 2)
    file = tmp_path / "x.kvos"

    def runtime_of(limit: int | None = None) -> kvos.Runtime:
        return kvos.open(
            family.model(torch.float64),
            tokenizer=toy_tokenizer(),
            home=tmp_path,
            max_context_tokens=limit,
            block_size=8,
        )

    def save(limit: int | None, declared: int) -> None:
        with runtime_of(limit) as runtime:
            session = runtime.session(max_tokens=declared)
            session.append_tokens(ids)
            session.prefill()
            session.save(file)

    def check(back: kvos.Session, declared: int) -> None:
        assert back.report().pending == 0
        assert close(back.score([9]), plain_of_exactly(family, [*ids, 9], declared)[-1:])

    save(None, LONG)
    with runtime_of() as runtime:
        check(runtime.load(file), LONG)
    with runtime_of(SHORT) as runtime:
        back = runtime.load(file)
        check(back, LONG)
        with pytest.raises(kvos.errors.ContextLengthExceededError, match=str(SHORT)):
            back.append_tokens([5] * SHORT)
    save(SHORT, SHORT)  # as long as that runtime allows anyway
    with runtime_of() as runtime:
        check(runtime.load(file), SHORT)


def test_how_much_memory_there_is_does_not_change_what_a_model_computes(family: Family) -> None:
    scores = []
    for cache_bytes in (1 << 17, 1 << 25):  # the smaller holds 64 tokens
        with kvos.open(
            family.model(torch.float64), tokenizer=toy_tokenizer(), block_size=8, cache_bytes=cache_bytes
        ) as runtime:
            scores.append((runtime.max_context_tokens, runtime.session().score(ids_of(30))))
    (small, one), (large, other) = scores
    assert small < large
    assert torch.equal(one, other)


def test_what_ran_before_does_not_change_a_models_identity(family: Family) -> None:
    model = family.model()
    before = TransformersEngine(family.model()).identity()
    with torch.inference_mode():
        model(input_ids=torch.full((1, 140), 5), use_cache=False)  # the library adapts its frequencies
    assert model_identity(model) == before
    assert TransformersEngine(model).identity() == before


def test_impossible_lengths_are_refused(family: Family) -> None:
    engine = TransformersEngine(family.model())
    driver = Driver(engine, declared=10)
    with pytest.raises(EngineContractError, match="longer than it declared"):
        driver.prefill(driver.history(12))
    with pytest.raises(UnsupportedModelError, match="depend on the length"):
        DynamicCacheEngine(family.model())
    with kvos.open(family.model(), tokenizer=toy_tokenizer()) as runtime:
        for wrong in (0, -1, True, 1.5, "9"):
            with pytest.raises(InvalidInputError, match="max_tokens"):
                runtime.session(max_tokens=wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidInputError, match=str(runtime.max_context_tokens)):
            runtime.session(max_tokens=runtime.max_context_tokens + 1)
        assert runtime.stats().sessions == 0
