"""The commands that open a model, on a toy model in a folder, from the command line to the last line printed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from typer.testing import CliRunner

import kvos.verify
from kvos.cli import app
from kvos.models.architectures import ARCHITECTURES
from kvos.testing.models import TOY_VOCAB_SIZE, toy_model, toy_tokenizer
from kvos.verify import Mismatch, VerifyReport
from kvos.verify.compare import Tally


@pytest.fixture(scope="module")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "toy"
    toy_model().save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVOS_KERNELS", "generic")
    monkeypatch.setenv("KVOS_CACHE_BYTES", "16MiB")


def test_chat_talks_over_a_pipe(home, toy_folder):
    words = ["chat", "--model", toy_folder, "--max-tokens", "4", "--block-size", "8", "--dtype", "fp32"]
    result = CliRunner().invoke(app, words, input="Hello\nAnd?\n/save monday\n")
    assert result.exit_code == 0, result.output
    assert "toy in fp32, context 4,096 tokens, KV cache up to 16.0 MiB in blocks of 8 tokens" in result.stdout
    assert len(re.findall(r"reused \d+, computed \d+ of \d+ tokens", result.stdout)) == 2
    # The same dtype, not auto: where a machine computes in bf16, the toy's rounded weights are another model.
    words = ["chat", "--model", toy_folder, "--dtype", "fp32", "--load", "monday"]
    again = CliRunner().invoke(app, words, input="/sessions\n")
    assert re.search(r"\* +monday +4 ", again.stdout), again.output


def test_chat_takes_its_system_message_from_a_file(home, toy_folder, tmp_path):
    (tmp_path / "system.txt").write_text("Answer in rhymes.\n")
    words = ["chat", "--model", toy_folder, "--system-file", str(tmp_path / "system.txt"), "--max-tokens", "2"]
    output = CliRunner().invoke(app, words, input="Hello\n/blocks 0\n").stdout
    assert "system⏎Answer" in output


def test_a_seed_makes_a_chat_repeatable(home, toy_folder):
    words = ["chat", "--model", toy_folder, "--max-tokens", "12", "--temperature", "1", "--seed", "3"]
    first, second = (CliRunner().invoke(app, words, input="Hello\n").stdout for _ in range(2))
    assert first.splitlines()[1:-2] == second.splitlines()[1:-2]


def test_verify_finds_that_the_toy_is_right(call, toy_folder, tmp_path):
    path = tmp_path / "verify.json"
    result = call("verify", "--model", toy_folder, "--dtype", "fp64", "--rounds", "1", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "Every hit equalled a recompute in 1 rounds." in result.stdout
    assert json.loads(path.read_text())["ok"] is True


def test_verify_fails_when_there_is_a_mismatch(call, monkeypatch):
    mismatch = Mismatch("logits", "logit 3 is wrong", 7, 7, ("open a session",), shrunk=True)
    report = VerifyReport("toy", "fp64", 5, 10, 7, Tally(), 0.0, 0, 0, 0.0, mismatch=mismatch)
    asked = {}

    def stand_in(model: str, **options: object) -> VerifyReport:
        asked.update(options, model=model)
        return report

    monkeypatch.setattr(kvos.verify, "run_verify", stand_in)
    result = call("verify", "--rounds", "10", "--seed", "5", "--round", "2", "--dtype", "bf16")
    assert result.exit_code == 1
    assert "MISMATCH in round 7, seed 5" in result.stdout
    assert (asked["rounds"], asked["seed"], asked["first_round"], asked["config"].dtype.value) == (10, 5, 2, "bf16")


def test_bench_decode_prints_both_sides(call, toy_folder, tmp_path):
    path = tmp_path / "bench.json"
    words = ("--sequences", "1,2", "--tokens", "16", "--model", toy_folder, "--dtype", "fp32", "--json", str(path))
    result = call("bench", "decode", *words)
    assert result.exit_code == 0, result.output
    assert "kvos ms" in result.stdout
    assert "FutureWarning" not in result.stderr
    assert [row["sequences"] for row in json.loads(path.read_text())["steps"]] == [1, 2]


def test_demo_without_its_model_says_what_is_missing(call):
    result = call("demo", "--model", "/nowhere")
    assert result.exit_code == 2
    assert "/nowhere does not exist" in " ".join(result.stderr.split())


def test_model_list_names_what_can_be_fetched(call, home: Path):
    output = call("model", "list").stdout
    assert re.search(r"smollm2-135m +SmolLM2-135M-Instruct \(Q4_1\) +Apache-2.0 +not here", output)
    assert not home.exists()


def test_options_win_over_the_environment(home, toy_folder, monkeypatch):
    monkeypatch.setenv("KVOS_BLOCK_SIZE", "32")
    words = ["chat", "--model", toy_folder]
    assert "blocks of 32 tokens" in CliRunner().invoke(app, words, input="").stdout
    assert "blocks of 8 tokens" in CliRunner().invoke(app, [*words, "--block-size", "8"], input="").stdout


def test_chat_is_refused_at_once_where_there_is_no_chat_template(tmp_path: Path) -> None:
    toy_model().save_pretrained(tmp_path)
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["chat", "--model", str(tmp_path)], input="Hello\n")
    assert result.exit_code == 2
    assert "chat_template.jinja" in result.output


def test_models_lists_what_runs_and_what_is_refused_with_the_reasons() -> None:
    result = CliRunner().invoke(app, ["models"], env={"COLUMNS": "120"})
    assert result.exit_code == 0
    for text in ("mistral", "sliding windows", "falcon", "AttentionInterface"):
        assert text in result.stdout
    data = json.loads(CliRunner().invoke(app, ["models", "--json"]).stdout)
    assert {one["model_type"] for one in data["tested"]} == set(ARCHITECTURES)
    assert {one["model_type"]: one["has"] for one in data["refused"]}["mpt"] == "ALiBi position biases"


def test_an_untested_type_opens_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = CONFIG_MAPPING["exaone4"](
        vocab_size=TOY_VOCAB_SIZE,
        num_key_value_heads=2,
        sliding_window=None,
        layer_types=["full_attention"] * 2,
        **sizes,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    toy_tokenizer().save_pretrained(tmp_path)
    words = ["verify", "--model", str(tmp_path), "--rounds", "1", "--dtype", "fp32"]
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 2
    assert "untested_models=True" in refused.output
    monkeypatch.setenv("KVOS_UNTESTED_MODELS", "1")
    for more in ([], ["--bitwise"]):
        result = CliRunner().invoke(app, [*words, *more])
        assert result.exit_code == 0, result.output
