"""The guards of the embedded engine, and what it leaves behind."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from engine.driver import Driver, Work, plain_logits
from kvos.engine import TransformersEngine
from kvos.engine.attention import ATTENTION_NAME
from kvos.engine.kernels import Kernels
from kvos.errors import EngineContractError, InvalidConfigError, MissingDependencyError, UnsupportedModelError
from kvos.storage import BlockPool
from kvos.testing import toy_model

GENERIC = Kernels("generic", "plain", "plain")


def opened(**settings: Any) -> tuple[LlamaForCausalLM, TransformersEngine, Driver]:
    model = toy_model(**settings)
    engine = TransformersEngine(model, kernels=GENERIC)
    return model, engine, Driver(engine)


def hooked(module: nn.Module, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Let ``change`` have the keywords of ``module``'s forward."""
    module.register_forward_pre_hook(lambda _, args, kwargs: (args, change(kwargs)), with_kwargs=True)


def forward(driver: Driver, rows: int = 4) -> torch.Tensor:
    return driver.step(Work(driver.history(20), rows))[0]


@pytest.mark.parametrize("kernels", [GENERIC, Kernels("generic", "packed", "plain"), Kernels()])
@pytest.mark.parametrize("owns_model", [False, True])
def test_close_leaves_the_model_as_it_was(kernels: Kernels, owns_model: bool) -> None:
    model = toy_model(tie_word_embeddings=True)
    model.train()
    model.model.layers[1].eval()
    ids = np.arange(30)
    before = plain_logits(model, ids)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    attributes = [set(vars(module)) for module in model.modules()]
    attention = model.config._attn_implementation
    engine = TransformersEngine(model, kernels=kernels, owns_model=owns_model)
    assert model.config._attn_implementation == ATTENTION_NAME
    forward(Driver(engine))
    engine.close()
    engine.close()
    assert model.config._attn_implementation == attention
    assert [module.training for module in model.modules()] == modes
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert torch.equal(plain_logits(model, ids), before)


def test_an_owned_model_keeps_no_plain_copy_of_packed_weights() -> None:
    model = toy_model(tie_word_embeddings=True)
    engine = TransformersEngine(model, kernels=Kernels("generic", "packed", "plain"), owns_model=True)
    assert model.model.layers[0].mlp.up_proj.weight.numel() == 0
    assert model.lm_head.weight.numel() > 0  # the embedding uses it
    assert engine.identity() == TransformersEngine(toy_model(tie_word_embeddings=True), kernels=GENERIC).identity()
    engine.close()
    assert model.model.layers[0].mlp.up_proj.weight.shape == (128, 64)


def test_two_engines_in_a_row_on_one_model() -> None:
    model = toy_model()
    TransformersEngine(model, kernels=GENERIC).close()
    driver = Driver(TransformersEngine(model, kernels=GENERIC))
    history = driver.history(20)
    logits = driver.prefill(history)
    assert torch.allclose(logits, plain_logits(toy_model(), history.ids), atol=1e-4)


def test_a_closed_engine_runs_no_more() -> None:
    _, engine, driver = opened()
    engine.close()
    with pytest.raises(EngineContractError, match="closed"):
        forward(driver)


def test_a_forward_without_a_pool_is_refused() -> None:
    _, _, driver = opened()
    batch = driver.batch([Work(driver.history(4), 4)])
    with pytest.raises(EngineContractError, match="no pool"):
        TransformersEngine(toy_model(), kernels=GENERIC).forward(batch)


def test_a_pool_of_another_layout_is_refused() -> None:
    _, engine, _ = opened()
    other = TransformersEngine(toy_model(), block_size=32, kernels=GENERIC)
    with pytest.raises(EngineContractError, match="layout"):
        engine.attach(BlockPool(other.layout, max_blocks=1, blocks_per_segment=1))


def test_someone_who_changes_the_attention_is_noticed() -> None:
    model, _, driver = opened()
    model.set_attn_implementation("sdpa")
    with pytest.raises(EngineContractError, match="'sdpa', not 'kvos'"):
        forward(driver)


def test_plain_use_of_the_model_while_an_engine_has_it_is_refused() -> None:
    model, _, _ = opened()
    with pytest.raises(EngineContractError, match="without a kvos batch"):
        model(input_ids=torch.zeros((1, 3), dtype=torch.long))


def test_a_batch_reaches_attention_although_the_model_drops_keywords() -> None:
    model, _, driver = opened()
    hooked(model.model.layers[1], lambda kwargs: {"position_embeddings": kwargs["position_embeddings"]})
    assert torch.isfinite(forward(driver)).all()


@pytest.mark.parametrize("change", [lambda layers: layers[:2], lambda layers: [*layers[:1], *layers[2:]]])
def test_a_layer_that_is_left_out_is_noticed(change: Callable[[Any], Any]) -> None:
    model, _, driver = opened()
    model.model.layers = nn.ModuleList(change(list(model.model.layers)))
    with pytest.raises(EngineContractError, match="layer"):
        forward(driver)


def test_a_layer_that_attends_twice_is_noticed() -> None:
    model, _, driver = opened()
    model.model.layers[1] = model.model.layers[0]
    with pytest.raises(EngineContractError, match="layer 0 ran where layer 1 was due"):
        forward(driver)


def test_a_layer_whose_attention_goes_elsewhere_is_noticed() -> None:
    model, _, driver = opened()
    for layer in model.model.layers:
        layer.self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(EngineContractError, match="0 of 3 layers"):
        forward(driver)


@pytest.mark.parametrize("keyword", ["position_bias", "head_mask", "never_heard_of"])
def test_a_keyword_that_may_change_the_result_is_refused_by_name(keyword: str) -> None:
    model, _, driver = opened()
    hooked(model.model.layers[0].self_attn, lambda kwargs: kwargs | {keyword: 30.0})
    with pytest.raises(EngineContractError, match=keyword):
        forward(driver)


def test_a_keyword_that_is_not_used_may_be_there() -> None:
    model, _, driver = opened()
    hooked(model.model.layers[0].self_attn, lambda kwargs: kwargs | {"softcap": None, "is_causal": True})
    assert torch.isfinite(forward(driver)).all()


@pytest.mark.parametrize("given", [{"attention_mask": torch.zeros(1, 1, 4, 4)}, {"is_causal": False}])
def test_a_mask_or_a_request_that_is_not_causal_is_refused(given: dict[str, Any]) -> None:
    model, _, driver = opened()
    hooked(model.model.layers[0].self_attn, lambda kwargs: kwargs | given)
    with pytest.raises(EngineContractError, match="mask"):
        forward(driver)


def test_the_scaling_of_the_model_is_honoured() -> None:
    def scaled(model: LlamaForCausalLM) -> LlamaForCausalLM:
        for layer in model.model.layers:
            layer.self_attn.scaling = 0.1
        return model

    driver = Driver(TransformersEngine(scaled(toy_model(dtype=torch.float64)), kernels=GENERIC))
    history = driver.history(20)
    logits = driver.prefill(history, 10, 1)
    assert torch.allclose(logits, plain_logits(scaled(toy_model(dtype=torch.float64)), history.ids), atol=1e-6)
    assert not torch.allclose(logits, plain_logits(toy_model(dtype=torch.float64), history.ids), atol=1e-2)


def test_a_model_that_does_more_in_attention_is_refused_at_load() -> None:
    model = toy_model()
    # An attention that looks at which implementation runs: kvos can't know what it does, only that results differ.
    for layer in model.model.layers:
        hooked(layer.self_attn, lambda kwargs: kwargs)
        plain = layer.self_attn.forward

        def odd(*args: Any, plain: Any = plain, **kwargs: Any) -> Any:
            out, weights = plain(*args, **kwargs)
            return (out * 3 if model.config._attn_implementation == ATTENTION_NAME else out), weights

        layer.self_attn.forward = odd
    with pytest.raises(UnsupportedModelError, match="differ from the plain model"):
        TransformersEngine(model, kernels=GENERIC)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: replace(b, write_slots=b.write_slots + 10**6), "write_slots"),
        (lambda b: replace(b, write_slots=b.write_slots[1:]), "differ in length"),
        (lambda b: replace(b, write_rows=b.write_rows + 1), "write_rows"),
        (lambda b: replace(b, logit_rows=np.array([4])), "logit_rows"),
        (lambda b: replace(b, block_tables=b.block_tables - 10**6), "names a block"),
        (lambda b: replace(b, context_lengths=b.context_lengths + 10**4), "shorter than its context"),
        (lambda b: replace(b, context_lengths=b.context_lengths - 1), "more rows than tokens"),
        (lambda b: replace(b, query_starts=np.array([0, 3])), "query_starts"),
        (
            lambda b: replace(b, query_starts=np.array([0, 4, 4]), context_lengths=np.array([4, 4])),
            "one block table per sequence",
        ),
        (lambda b: replace(b, positions=b.positions[:2]), "positions"),
    ],
)
def test_a_batch_that_contradicts_itself_or_the_pool_is_refused(change: Callable[[Any], Any], message: str) -> None:
    _, engine, driver = opened()
    batch = driver.batch([Work(driver.history(20), 4)])
    with pytest.raises(EngineContractError, match=message):
        engine.forward(change(batch))


def test_kernels_that_do_not_exist_are_refused() -> None:
    with pytest.raises(InvalidConfigError, match="kernels is 'fastest'"):
        TransformersEngine(toy_model(), kernels="fastest")  # type: ignore[arg-type]
    with pytest.raises(InvalidConfigError, match="float32 on the CPU"):
        TransformersEngine(toy_model(dtype=torch.float64), kernels=Kernels(attention="numba"))
    with pytest.raises(InvalidConfigError, match="fused norms"):
        TransformersEngine(toy_model(dtype=torch.float64), kernels=Kernels(norm="fused"))
    with pytest.raises(InvalidConfigError, match="packed linear"):
        TransformersEngine(toy_model(dtype=torch.float64), kernels=Kernels(linear="packed"))


def test_without_numba_auto_takes_the_generic_path_and_asking_by_name_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    assert TransformersEngine(toy_model()).kernels.attention == "generic"
    with pytest.raises(MissingDependencyError, match=r"kvos\[fast\]"):
        TransformersEngine(toy_model(), kernels=Kernels(attention="numba"))


def test_generic_kernels_by_one_word() -> None:
    assert TransformersEngine(toy_model(), kernels="generic").kernels == GENERIC
