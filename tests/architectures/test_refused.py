"""What cannot run exactly is refused by the name of what is missing, and what nobody has tested only on request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.driver import Driver
from kvos.engine import TransformersEngine
from kvos.errors import EngineContractError, UnsupportedModelError
from kvos.models.architectures import ARCHITECTURES, REFUSED

SMALL: dict[str, Any] = {
    "vocab_size": 80,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "falcon": {},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "bloom": {"n_layer": 2, "n_head": 4},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
    "mamba": {},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 8},
    "rwkv": {"attention_hidden_size": 32},
    "jamba": {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"], "num_experts": 2, "num_experts_per_tok": 1},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8},
    "diffllama": {},
    "llama4_text": {"num_local_experts": 2, "head_dim": 8, "intermediate_size_mlp": 48},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
}


def small(model_type: str, **settings: Any) -> PreTrainedModel:
    config = CONFIG_MAPPING[model_type](**{**SMALL, **SETTINGS.get(model_type, {}), **settings})
    loader = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = loader.from_config(config).eval()
    return model


def test_every_row_has_a_small_model() -> None:
    assert SETTINGS.keys() == REFUSED.keys()
    assert not SETTINGS.keys() & ARCHITECTURES.keys()


@pytest.mark.parametrize("untested", [False, True])
@pytest.mark.parametrize("model_type", REFUSED)
def test_it_is_refused_by_what_is_missing(model_type: str, untested: bool) -> None:
    model = small(model_type)
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError) as caught:
        TransformersEngine(model, untested=untested)
    text = str(caught.value)
    assert repr(model_type) in text
    assert REFUSED[model_type].missing in text or "encoder-decoder" in text
    assert model.config._attn_implementation == before


def test_an_untested_type_is_refused_and_the_error_says_how_to_try_it() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'exaone4' was not tested.*untested_models=True"):
        TransformersEngine(small("exaone4"))


def test_an_untested_type_that_agrees_with_itself_runs_on_request() -> None:
    settings = {"sliding_window": 13, "layer_types": ["sliding_attention", "full_attention"], "initializer_range": 0.2}
    driver = Driver(TransformersEngine(small("exaone4", **settings), untested=True))
    history = driver.history(60)
    logits = driver.prefill(history, 20, 1)
    plain = small("exaone4", **settings)
    plain.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = plain(input_ids=torch.from_numpy(history.ids.astype(np.int64))[None], use_cache=False).logits[0]
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()


class _LooksFarBack(nn.Module):
    """An attention that gives the first token's input to every row from the 40th on: no cache can know of it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: torch.Tensor, **keywords: Any) -> Any:
        out, weights = self.inner(hidden_states, **keywords)
        if out.shape[1] > 40:
            out = out + 0
            out[:, 40:] += hidden_states[:, :1]
        return out, weights


def test_an_untested_type_that_does_something_else_fails_its_self_test() -> None:
    model = small("exaone4", sliding_window=None, layer_types=["full_attention"] * 2, initializer_range=0.2)
    model.model.layers[0].self_attn = _LooksFarBack(model.model.layers[0].self_attn)
    with pytest.raises(EngineContractError, match="does something in attention that kvos does not know"):
        TransformersEngine(model, untested=True)
    assert model.config._attn_implementation != "kvos"


def test_a_window_that_the_context_cannot_pass_makes_a_self_test_impossible() -> None:
    model = small("exaone4", sliding_window=120, layer_types=["sliding_attention", "full_attention"])
    with pytest.raises(UnsupportedModelError, match="past its window of 120"):
        TransformersEngine(model, untested=True)
