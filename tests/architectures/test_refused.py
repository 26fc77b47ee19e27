"""What cannot run exactly is refused by the name of what is missing, and what nobody has tested only on request."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, LlamaForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import kvos.engine.kernels.packed_linear
import kvos.models.config_checks
from architectures.families import FAMILIES
from engine.driver import Driver, Work
from kvos.engine import TransformersEngine
from kvos.engine.support import is_changed_by_hand
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
    "gemma3": {
        "text_config": {**SMALL, "head_dim": 8},
        "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4},
    },
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
    assert REFUSED[model_type].has in text
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("model_type", REFUSED)
def test_it_would_be_refused_without_the_table(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table names the reason; the guards behind it look at the model itself."""
    monkeypatch.setattr(kvos.models.config_checks, "REFUSED", {})
    model = small(model_type)
    with pytest.raises(UnsupportedModelError, match=model_type):
        TransformersEngine(model, untested=True)
    assert model.config._attn_implementation != "kvos"


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
    with pytest.raises(UnsupportedModelError, match="kvos does not know"):
        TransformersEngine(model, untested=True)
    assert model.config._attn_implementation != "kvos"


def test_a_window_that_the_context_cannot_pass_makes_a_self_test_impossible() -> None:
    model = small("exaone4", sliding_window=120, layer_types=["sliding_attention", "full_attention"])
    with pytest.raises(UnsupportedModelError, match="past its window of 120"):
        TransformersEngine(model, untested=True)


def from_family(name: str, **settings: Any) -> PreTrainedModel:
    return FAMILIES[name].model(torch.float64, **settings)


def test_a_config_whose_mask_and_keywords_contradict_each_other_is_refused() -> None:
    model = from_family("smollm3", use_sliding_window=False, sliding_window=13)  # the mask has the window, no call does
    with pytest.raises(UnsupportedModelError, match=r"window of 13.*says None"):
        TransformersEngine(model)


@pytest.mark.parametrize("name", ["qwen3", "cohere2", "gemma2", "gpt_oss", "gemma3_text", "qwen3_moe"])
def test_a_window_that_was_changed_in_the_config_alone_is_refused(name: str) -> None:
    model = from_family(name)
    model.config.sliding_window = 7
    with pytest.raises(UnsupportedModelError, match=r"window of 7.*says 13"):
        TransformersEngine(model)


def test_a_window_that_changes_while_the_engine_is_open_is_noticed() -> None:
    model = from_family("mistral")
    driver = Driver(TransformersEngine(model))
    history = driver.history(20)
    driver.prefill(history, 9, 1)
    model.config.sliding_window = 7
    with pytest.raises(EngineContractError, match="asked for"):
        driver.prefill(driver.history(20))


@pytest.mark.parametrize(
    ("name", "settings"), [("gpt_oss", {"sliding_window": 0}), ("granite", {"attention_multiplier": -1.0})]
)
def test_numbers_that_make_no_sense_are_refused_by_name(name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"window of 0 tokens|scales its scores by -1"):
        TransformersEngine(from_family(name, **settings))


@pytest.mark.parametrize("model_type", ["qwen2_moe", "phimoe"])
def test_a_window_in_the_mask_alone_is_refused(model_type: str) -> None:
    window = {"use_sliding_window": True, "sliding_window": 20, "layer_types": ["sliding_attention"] * 2}
    experts = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    with pytest.raises(UnsupportedModelError, match=r"window of 20.*says None"):
        TransformersEngine(small(model_type, **window, **experts), untested=True)


def test_a_forward_that_fails_by_itself_is_told_so() -> None:
    model = from_family("llama")
    model.model.norm = nn.LayerNorm(7).double()
    with pytest.raises(UnsupportedModelError, match="fails in its own forward"):
        TransformersEngine(model)
    assert model.config._attn_implementation != "kvos"


def _steer_long_ones(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
    return output + output[:, :1] if output.shape[1] > 8 else output


def test_a_hook_that_looks_at_other_tokens_is_noticed() -> None:
    model = from_family("llama")
    model.model.layers[1].mlp.register_forward_hook(_steer_long_ones)
    with pytest.raises(UnsupportedModelError, match="kvos does not know"):
        TransformersEngine(model)


def test_a_hook_that_treats_each_row_alike_is_welcome() -> None:
    model = from_family("llama")
    model.model.layers[1].mlp.register_forward_hook(lambda _, __, output: output * 0.5)
    TransformersEngine(model).close()


def test_a_class_of_ones_own_has_to_pass_the_thorough_trial() -> None:
    class Peeks(LlamaForCausalLM):
        def forward(self, input_ids: torch.Tensor, **keywords: Any) -> Any:
            output = super().forward(input_ids=input_ids, **keywords)
            if input_ids.shape[1] > 8:
                output.logits = output.logits * 1.5
            return output

    model = from_family("llama")
    model.__class__ = Peeks
    with pytest.raises(UnsupportedModelError, match="kvos does not know"):
        TransformersEngine(model)


def test_a_forward_that_ignores_logits_to_keep_is_noticed() -> None:
    class KeepsAll(LlamaForCausalLM):
        def forward(self, *args: Any, logits_to_keep: Any = 0, **keywords: Any) -> Any:
            return super().forward(*args, **keywords)

    model = from_family("llama")
    model.__class__ = KeepsAll
    driver = Driver(TransformersEngine(model))  # its trial asks for all rows
    with pytest.raises(EngineContractError, match="ignores logits_to_keep"):
        driver.engine.forward(driver.batch([Work(driver.history(20), 20)], np.array([19])))


def test_compiled_models_are_refused() -> None:
    model = from_family("llama")
    model.model.layers[0].compile(backend="eager")
    with pytest.raises(UnsupportedModelError, match="compiled"):
        TransformersEngine(model)


@pytest.mark.parametrize("name", ["llama", "llama-dynamic"])
def test_a_model_that_is_in_use_is_refused(name: str) -> None:
    model = from_family(name)
    first = TransformersEngine(model)
    with pytest.raises(UnsupportedModelError, match="in use"):
        TransformersEngine(model)
    first.close()
    TransformersEngine(model).close()


def test_projections_that_are_one_module_survive_opening_and_closing() -> None:
    model = FAMILIES["llama"].model(num_key_value_heads=4)
    attention = model.model.layers[0].self_attn
    attention.k_proj = attention.q_proj
    TransformersEngine(model).close()
    assert not any("forward" in vars(module) for module in model.modules())
    assert model.config._attn_implementation != "kvos"


def test_a_failure_while_weights_are_packed_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, pack, calls = FAMILIES["llama"].model(), kvos.engine.kernels.packed_linear._Group, count()

    def fails_late(*args: Any, **options: Any) -> Any:
        if next(calls) == 3:
            raise MemoryError
        return pack(*args, **options)

    monkeypatch.setattr(kvos.engine.kernels.packed_linear, "_Group", fails_late)
    with pytest.raises(MemoryError):
        TransformersEngine(model, owns_model=True)
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(parameter.numel() for parameter in model.parameters())


def test_a_part_of_another_class_has_to_pass_the_thorough_trial() -> None:
    class Averages(nn.Module):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states.mean(1, keepdim=True).expand_as(hidden_states) * (hidden_states.shape[1] > 8)

    model = from_family("llama")
    model.model.layers[0].mlp = Averages()
    with pytest.raises(UnsupportedModelError, match="kvos does not know"):
        TransformersEngine(model)


def test_hooks_that_the_library_left_do_not_matter() -> None:
    model = from_family("phi3", sliding_window=600)  # more than its context, so a thorough trial could not pass it
    with torch.inference_mode():
        model(input_ids=torch.arange(5)[None], use_cache=False, output_hidden_states=True)
    assert not is_changed_by_hand(model)
    model.model.layers[0].mlp.register_forward_hook(lambda _, __, output: output)
    assert is_changed_by_hand(model)
    TransformersEngine(model).close()  # a window of more than the context is none


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_noise_does_not_fail_a_thorough_trial(dtype: torch.dtype) -> None:
    for seed in range(5):
        model = FAMILIES["llama"].model(dtype, seed=seed)
        model.model.layers[1].mlp.register_forward_hook(lambda _, __, output: output)
        TransformersEngine(model).close()


def test_an_interrupted_close_can_be_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES["llama"].model()
    engine = TransformersEngine(model)
    with monkeypatch.context() as patch:
        patch.setattr(kvos.engine.kernels.packed_linear._Group, "undo", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.close()
    engine.close()
    assert not any("forward" in vars(module) for module in model.modules())
    assert model.config._attn_implementation != "kvos"


def _interrupted(_: Any) -> None:
    raise KeyboardInterrupt
