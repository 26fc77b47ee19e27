"""Sessions on every architecture: random lives of agents, and a folder in the family's own format that chats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import kvos
from architectures.families import FAMILIES, WINDOW, Family
from kvos.config import KvosConfig
from kvos.engine.probe import layout_from, probe_layers
from kvos.engine.rope import declared_length
from kvos.errors import ContextLengthExceededError
from kvos.testing import toy_tokenizer
from kvos.testing.models import TOY_CHAT_TEMPLATE
from kvos.verify import run_verify


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
def test_random_histories_agree_with_runs_without_a_cache(
    family: Family, dtype: torch.dtype, rounds: Callable[[int, int], int]
) -> None:
    report = run_verify(family.model(dtype), tokenizer=toy_tokenizer(), rounds=rounds(1, 60), seed=3, max_trials=0)
    assert report.ok, report.mismatch
    assert report.tally.logit_rows > 10


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss", "llama-longrope", "phi3-longrope"])
def test_random_histories_behind_many_tokens(name: str, rounds: Callable[[int, int], int]) -> None:
    """Past every window and every RoPE's boundary, with the length that the model declares by itself."""
    model = FAMILIES[name].model(torch.float64)
    report = run_verify(model, tokenizer=toy_tokenizer(), rounds=rounds(1, 20), seed=5, behind=150, max_trials=0)
    assert report.ok, report.mismatch
    assert report.behind == 150


@pytest.mark.parametrize("name", ["llama-dynamic", "llama-longrope"])
def test_verification_declares_what_its_runtimes_allow(name: str) -> None:
    config = KvosConfig.from_env(max_context_tokens=100)
    report = run_verify(FAMILIES[name].model(torch.float64), tokenizer=toy_tokenizer(), config=config, rounds=1, seed=3)
    assert report.ok, report.mismatch


def test_a_folder_in_the_familys_format_opens_and_chats(family: Family, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    family.model().save_pretrained(folder)
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = TOY_CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    home = tmp_path / "home"
    with kvos.open(folder, home=home, dtype="fp32", block_size=8) as runtime:
        agent = runtime.session(
            "agent", messages={"role": "system", "content": "A prompt that is longer than a window."}
        )
        agent.append({"role": "user", "content": "Hello?"})
        agent.generate(max_tokens=4, ignore_eos=True).result()
        scout, clerk = agent.fork(2)
        scout.append({"role": "user", "content": "Go and look."})
        replies = [child.generate(max_tokens=4, ignore_eos=True) for child in (scout, clerk)]
        assert all(len(reply.result().tokens) == 4 for reply in replies)
        assert replies[0].usage.reused_tokens > WINDOW
        scout.save("scout")
        tokens = scout.tokens.tolist()
        raw = runtime.session("raw")
        raw.append_tokens(tokens)
        raw.prefill()
        raw.save("raw")
        runtime.check_invariants()
    with kvos.open(folder, home=home, dtype="fp32", block_size=16) as runtime:
        back = runtime.load("scout")
        assert back.tokens.tolist() == tokens
        assert back.report().pending <= 1
        logits = runtime.load("raw").score([7, 11])
        plain = family.model()
        plain.set_attn_implementation("eager")
        with torch.inference_mode(), declared_length(plain, runtime.max_context_tokens):
            expected = plain(input_ids=torch.tensor([[*tokens, 7, 11]]), use_cache=False).logits[0, -2:]
        assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
        back.append({"role": "user", "content": "And?"})
        assert back.generate(max_tokens=4, ignore_eos=True).usage.reused_tokens >= len(tokens) - 16


def test_keys_from_another_config_are_computed_anew(tmp_path: Path) -> None:
    ids = list(range(5, 45))
    with kvos.open(FAMILIES["mistral"].model(torch.float64), tokenizer=toy_tokenizer(), home=tmp_path) as runtime:
        session = runtime.session("x")
        session.append_tokens(ids)
        session.prefill()
        session.save("x")
    other = FAMILIES["mistral"].model(torch.float64, sliding_window=None)
    with kvos.open(other, tokenizer=toy_tokenizer(), home=tmp_path) as runtime:
        back = runtime.load("x")
        assert back.report().pending == len(ids)
        logits = back.score([7])
    plain = FAMILIES["mistral"].model(torch.float64, sliding_window=None)
    with torch.inference_mode():
        expected = plain(input_ids=torch.tensor([[*ids, 7]]), use_cache=False).logits[0, -1:]
    assert (logits - expected).abs().max() <= 5e-6 * expected.abs().max()


def test_layers_with_a_window_store_every_token(family: Family) -> None:
    layers = probe_layers(family.model())
    layout = layout_from(layers, 16, torch.float32)
    heads = {"deepseek_v3": (4, 24, 12), "gpt_neox": (4, 16, 16), "gpt2": (4, 16, 16), "opt": (4, 16, 16)}
    kv_heads, k_dim, v_dim = heads.get(family.name, (2, 16, 16))
    assert layout.bytes_per_token == 4 * kv_heads * (k_dim + v_dim) * 4  # layers, heads, sizes, float32


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_a_table_of_positions_ends_at_admission(name: str) -> None:
    with kvos.open(FAMILIES[name].model(), tokenizer=toy_tokenizer()) as runtime:
        assert runtime.max_context_tokens == 512
        session = runtime.session()
        session.append_tokens([5] * 510)
        with pytest.raises(ContextLengthExceededError):
            session.append_tokens([5] * 3)
        assert session.generate(max_tokens=9, ignore_eos=True).usage.generated_tokens == 2
