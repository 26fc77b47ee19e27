"""Settings are checked when they are made, from whatever place they come."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from kvos.config import ALLOWED_BLOCK_SIZES, KvosConfig
from kvos.errors import InvalidConfigError
from kvos.storage.layout import BLOCK_SIZES
from kvos.types import DType


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in dataclasses.fields(KvosConfig):
        monkeypatch.delenv(f"KVOS_{setting.name.upper()}", raising=False)


def test_the_defaults_are_valid_and_documented() -> None:
    config = KvosConfig.from_env()
    assert config == KvosConfig()
    assert (config.block_size, config.dtype, config.device) == (16, "auto", "auto")
    for setting in dataclasses.fields(KvosConfig):
        assert f"\n        {setting.name}: " in (KvosConfig.__doc__ or ""), setting.name


def test_the_block_sizes_are_those_of_the_storage_layer() -> None:
    assert ALLOWED_BLOCK_SIZES == BLOCK_SIZES


def test_the_environment_is_read_and_overrides_win(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVOS_HOME", str(tmp_path))
    monkeypatch.setenv("KVOS_BLOCK_SIZE", "32")
    monkeypatch.setenv("KVOS_DTYPE", "bf16")
    monkeypatch.setenv("KVOS_CACHE_BYTES", "2 GiB")
    monkeypatch.setenv("KVOS_THREADS", "none")
    monkeypatch.setenv("KVOS_OFFLINE", "yes")
    monkeypatch.setenv("KVOS_KERNELS", "")
    config = KvosConfig.from_env(block_size=8)
    assert config.home == tmp_path
    assert config.block_size == 8
    assert config.dtype is DType.BF16
    assert config.cache_bytes == 2 << 30
    assert config.threads is None
    assert config.offline is True
    assert config.kernels == "auto"


@pytest.mark.parametrize(
    ("name", "value", "range_"),
    [
        ("block_size", 12, "one of 8, 16, 32, 64, 128"),
        ("block_size", True, "one of 8"),
        ("block_size", "sixteen", "one of 8"),
        ("dtype", "int8", "one of 'auto', 'fp64'"),
        ("dtype", None, "one of 'auto'"),
        ("device", "gpu", "'cuda:N'"),
        ("device", 0, "'cuda:N'"),
        ("cache_bytes", -1, "a whole number from 4096"),
        ("cache_bytes", 1.5, "a whole number"),
        ("segment_bytes", None, "a whole number"),
        ("max_context_tokens", 0, "a whole number from 1"),
        ("prefill_chunk_tokens", 0, "a whole number from 1"),
        ("max_batch_tokens", 0, "a whole number from 1"),
        ("max_running", True, "a whole number from 1"),
        ("threads", 0, "a whole number from 1"),
        ("kernels", "fast", "one of 'auto', 'generic'"),
        ("offline", "yes", "True or False"),
        ("home", None, "a folder"),
        ("home", "", "a folder"),
        ("home", "~nobody-of-this-name/x", "a folder"),
        ("home", "a\0b", "a folder"),
    ],
)
def test_a_value_out_of_range_is_named_with_the_range(name: str, value: object, range_: str) -> None:
    with pytest.raises(InvalidConfigError) as raised:
        KvosConfig(**{name: value})
    text = str(raised.value)
    assert text.startswith(f"{name} is {value!r}; expected ")
    assert range_ in text


@pytest.mark.parametrize("value", [16.0, np.array([16, 16]), np.array(16.0), torch.tensor([16, 16]), [16], {}])
def test_a_block_size_of_another_type_is_refused(value: object) -> None:
    with pytest.raises(InvalidConfigError, match=r"block_size is .*; expected one of 8"):
        KvosConfig(block_size=value)


@pytest.mark.parametrize("value", [np.int64(16), torch.tensor(16)])
def test_a_whole_number_of_any_kind_is_one(value: object) -> None:
    config = KvosConfig(block_size=value, threads=value)
    assert (type(config.block_size), config.block_size) == (int, 16)
    assert (type(config.threads), config.threads) == (int, 16)


@pytest.mark.parametrize("name", [setting.name for setting in dataclasses.fields(KvosConfig)])
@pytest.mark.parametrize("digits", [19, 400, 5000])
def test_a_number_of_any_length_is_refused_by_name(name: str, digits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidConfigError, match=f"{name} is .*; expected"):
        KvosConfig(**{name: 10**digits})
    if name != "home":
        monkeypatch.setenv(f"KVOS_{name.upper()}", "9" * digits)
        with pytest.raises(InvalidConfigError, match=f"{name} is .*; expected"):
            KvosConfig.from_env()


def test_more_threads_than_any_machine_has_are_refused() -> None:
    with pytest.raises(InvalidConfigError, match="threads is 2147483648; expected a whole number from 1 to 4096"):
        KvosConfig(threads=2**31)


def test_a_bad_environment_value_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVOS_MAX_RUNNING", "many")
    with pytest.raises(InvalidConfigError, match="max_running is 'many'"):
        KvosConfig.from_env()
    monkeypatch.setenv("KVOS_MAX_RUNNING", "4 GiB")
    with pytest.raises(InvalidConfigError, match="max_running is '4 GiB'"):
        KvosConfig.from_env()


def test_each_running_sequence_has_a_token_in_a_step() -> None:
    with pytest.raises(InvalidConfigError, match=r"max_batch_tokens is 8; expected at least max_running \(9\)"):
        KvosConfig(max_batch_tokens=8, max_running=9)


def test_an_unknown_setting_is_answered_with_the_nearest_and_all() -> None:
    with pytest.raises(InvalidConfigError, match="Did you mean 'block_size'") as raised:
        KvosConfig.from_env(blok_size=16)
    for setting in dataclasses.fields(KvosConfig):
        assert setting.name in str(raised.value)


def test_a_mistyped_variable_is_logged_and_a_foreign_one_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVOS_BLOCKSIZE", "32")
    monkeypatch.setenv("KVOS_SOMETHING_ELSE", "1")
    assert KvosConfig.from_env().block_size == 16
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "ignored environment variable KVOS_BLOCKSIZE"
    ]


def test_home_is_absolute_and_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert KvosConfig(home="here").home == tmp_path / "here"
    assert KvosConfig(home="~/there").home == Path.home() / "there"


def test_it_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        KvosConfig().block_size = 8
