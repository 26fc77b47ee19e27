"""One way to open a model, wherever it is: the catalogue, a folder, a hub, or the caller's hands."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from kvos.config import KvosConfig
from kvos.errors import (
    InvalidConfigError,
    InvalidInputError,
    ModelDamagedError,
    ModelFetchError,
    ModelNotAvailableError,
    UnsupportedModelError,
)
from kvos.models.catalogue import CatalogueModel, closest_name, find
from kvos.models.config_checks import check_supported
from kvos.models.dtypes import resolve_device, resolve_dtype, short_name
from kvos.models.fetch import install
from kvos.models.hub import Reach, reach_hub
from kvos.models.progress import BarProgress, Progress
from kvos.models.store import WEIGHTS_NAME, how_to_get, model_folder, open_manifest, verify_file

__all__ = ["LoadedModel", "ModelOrigin", "load_installed", "load_model"]


class ModelOrigin(Enum):
    """Where a model was taken from."""

    CATALOGUE = "catalogue"
    FOLDER = "folder"
    HUB = "hub"
    CALLER = "caller"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to compute, and its tokenizer.

    Attributes:
        model: in eval mode and without gradients if kvos loaded it, else as the caller gave it.
        tokenizer: with the model's own chat template.
        name: as a person would call it.
        source: where it was taken from.
        device, dtype: of its weights.
        owned: kvos loaded it, so nobody else uses it and it may be changed for good.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    source: ModelOrigin
    device: torch.device
    dtype: torch.dtype
    owned: bool


def load_model(
    spec: str | os.PathLike[str] | None = None,
    *,
    config: KvosConfig,
    model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Open a model by name, folder or hub id, or take the objects that the caller has.

    A model of the catalogue that isn't on this machine is fetched first, unless ``config.offline``: one line on
    stderr says so, and ``progress`` (a bar on stderr by default) shows how far it is. Its files are checked by digest
    on each load. A name that is a folder here is that folder; anything else is looked for on the model hub, and in
    the hub's cache if the hub can't be reached within seconds. Weights are read from safetensors only.

    Raises:
        InvalidInputError: neither ``spec`` nor ``model`` and ``tokenizer``, or both.
        InvalidConfigError: dtype or device that the machine lacks, or that the given model doesn't have.
        ModelNotAvailableError: not here, and it can't be fetched; the text says what to do.
        ModelDamagedError: files of the catalogue's model aren't what was written; weights are unreadable or missing.
        UnsupportedModelError: not a decoder that the library can load and kvos can run. Found in the config, before
            any weights are fetched.
    """
    if model is not None or tokenizer is not None:
        if spec is not None or model is None or tokenizer is None:
            raise InvalidInputError("give either a model's name, folder or hub id, or both model= and tokenizer=")
        return _take(model, tokenizer, config)
    if spec is None or not str(spec).strip():
        raise InvalidInputError("no model given; expected a name such as 'smollm2-135m', a folder or a hub id")
    folder = Path(spec).expanduser()
    entry = find(spec) if isinstance(spec, str) else None
    if entry is not None:
        _fetch_if_missing(entry, config, progress)
        return load_installed(entry, config=config)
    if folder.exists() or not isinstance(spec, str) or spec.startswith((".", "~")) or folder.is_absolute():
        return _load_folder(folder, config)
    return _load_from_hub(spec, config)


def load_installed(entry: CatalogueModel, *, config: KvosConfig) -> LoadedModel:
    """Load a converted model from ``config.home``, checking its files by digest.

    The weights' digest is computed in a thread beside their loading; nothing is returned before it was found right.

    Raises:
        ModelNotAvailableError: it isn't there; nothing is fetched.
        ModelDamagedError: a file is missing or isn't what was written.
    """
    folder = model_folder(entry.name, config.home)
    manifest = open_manifest(folder, entry.name)
    if manifest.source.sha256 != entry.gguf_sha256:
        raise ModelDamagedError(
            f"model {entry.name!r} in {folder} was made from {manifest.source.package}, expected {entry.requirement}. "
            f"Run `kvos model fetch {entry.name} --force`."
        )
    for name in manifest.files:
        if name != WEIGHTS_NAME:
            verify_file(folder, name, manifest)
    with ThreadPoolExecutor(1, thread_name_prefix="kvos-verify") as pool:
        verdict = pool.submit(verify_file, folder, WEIGHTS_NAME, manifest)
        try:
            loaded = _from_pretrained(str(folder), entry.name, ModelOrigin.CATALOGUE, config, local_files_only=True)
        finally:
            verdict.result()  # a damaged file is the better explanation of a load that failed
    return loaded


def _take(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: KvosConfig) -> LoadedModel:
    dtype, device = model.dtype, model.device
    if config.dtype != "auto" and resolve_dtype(config.dtype, device) != dtype:
        raise InvalidConfigError(
            f"dtype is {config.dtype.value!r}, the given model is in {short_name(dtype).value!r}; "
            "expected 'auto' or the model's own"
        )
    wanted = device if config.device == "auto" else resolve_device(config.device)
    if wanted.type != device.type or wanted.index not in (None, device.index):
        raise InvalidConfigError(
            f"device is {config.device!r}, the given model is on '{device}'; expected 'auto' or the model's own"
        )
    short_name(dtype)  # refuses what kvos doesn't compute in
    name = model.config.name_or_path or type(model).__name__
    return LoadedModel(model, tokenizer, str(name), ModelOrigin.CALLER, device, dtype, owned=False)


def _fetch_if_missing(entry: CatalogueModel, config: KvosConfig, progress: Progress | None) -> None:
    folder = model_folder(entry.name, config.home)
    if folder.is_dir():
        return
    if config.offline:
        raise ModelNotAvailableError(
            f"model {entry.name!r} is not on this machine (no folder {folder}), and offline is set. "
            f"{how_to_get(entry.name)}"
        )
    size = entry.package_bytes / 1e6
    sys.stderr.write(f"kvos: fetching {entry.title}, {size:.0f} MB, once, into {folder}\n")
    try:
        install(entry, config.home, progress=progress or BarProgress())
    except ModelFetchError as error:
        raise ModelNotAvailableError(f"model {entry.name!r} is not on this machine, and {error}") from error


def _load_folder(folder: Path, config: KvosConfig) -> LoadedModel:
    if folder.suffix == ".gguf":
        raise UnsupportedModelError(
            f"{folder} is a GGUF file; expected a folder with config.json and safetensors. "
            "kvos converts only the GGUF files of its own catalogue"
        )
    if not (folder / "config.json").is_file():
        problem = "has no config.json" if folder.is_dir() else "does not exist"
        raise ModelNotAvailableError(f"{folder.absolute()} {problem}; expected the folder of a Transformers model")
    name = folder.resolve().name
    return _from_pretrained(str(folder), name, ModelOrigin.FOLDER, config, local_files_only=True)


def _load_from_hub(model_id: str, config: KvosConfig) -> LoadedModel:
    guess = closest_name(model_id)
    hint = f" Did you mean {guess!r}?" if guess else ""
    answer = reach_hub(model_id, offline=config.offline)
    if answer.reach is Reach.REFUSED:
        raise ModelNotAvailableError(f"the hub has no model {model_id!r} for you: {answer.detail}.{hint}")
    local_only = answer.reach is Reach.UNREACHABLE
    try:
        return _from_pretrained(model_id, model_id, ModelOrigin.HUB, config, local_files_only=local_only)
    except ModelNotAvailableError as error:
        raise ModelNotAvailableError(
            f"model {model_id!r} is not a folder here, not in the hub's cache, and the hub was not reached: "
            f"{answer.detail or error}.{hint} Check the network, or download the model elsewhere and give its folder."
        ) from error


def _from_pretrained(
    location: str, name: str, origin: ModelOrigin, config: KvosConfig, *, local_files_only: bool
) -> LoadedModel:
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    options: dict[str, Any] = {"local_files_only": local_files_only, "trust_remote_code": False}
    try:
        with _quiet_library(bars=not local_files_only):
            check_supported(AutoConfig.from_pretrained(location, **options), untested=config.untested_models)
            tokenizer = AutoTokenizer.from_pretrained(location, **options)
            pair: Any = AutoModelForCausalLM.from_pretrained(
                location, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
            )
    except SafetensorError as error:
        raise ModelDamagedError(f"the weights of {name} in {location} can't be read: {_first_line(error)}") from error
    except OSError as error:
        raise ModelNotAvailableError(f"{name} could not be loaded from {location}: {_first_line(error)}") from error
    except (ValueError, KeyError, ImportError) as error:
        raise UnsupportedModelError(
            f"{name} is not a decoder that Transformers can load from {location}: {_first_line(error)}"
        ) from error
    model, report = pair
    absent = sorted(report["missing_keys"])
    if absent:  # the library would go on with random values for them
        raise ModelDamagedError(f"{location} lacks {len(absent)} weights of {name}, {absent[0]!r} among them")
    model = model.to(device).eval().requires_grad_(requires_grad=False)
    if dtype == torch.float64 and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the library's grouped kernels have no float64
    return LoadedModel(model, tokenizer, name, origin, device, dtype, owned=True)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def _quiet_library(*, bars: bool) -> Iterator[None]:
    """Keep the library's warnings, and unless ``bars`` its bars, off the terminal; restored afterwards."""
    verbosity, had_bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    if not bars:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()
