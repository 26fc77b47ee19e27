"""The embedded engine: a Transformers decoder over block tables, prefill chunks and decodes in one packed row."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch.backends.cpu import get_cpu_capability
from transformers import PreTrainedModel

from kvos.engine.attention import ATTENTION_NAME, PackedForward, running
from kvos.engine.base import Engine, EngineInfo, PackedBatch
from kvos.engine.batch_invariance import check_bits, check_deterministic, padded, row_by_row
from kvos.engine.identity import model_identity
from kvos.engine.kernels import Kernels, KernelSet, select_kernels
from kvos.engine.plan import BatchPlan, check_batch
from kvos.engine.probe import layout_from, probe_layers
from kvos.engine.rope import DeclaredRope
from kvos.engine.support import check_model, is_changed_by_hand
from kvos.engine.trial import Trial
from kvos.errors import EngineContractError, InvalidConfigError, UnsupportedModelError
from kvos.models.architectures import ARCHITECTURES
from kvos.models.config_checks import context_of
from kvos.storage import BlockPool

__all__ = ["TransformersEngine"]


class TransformersEngine(Engine):
    """Runs a supported model through the attention function of kvos. Engine thread only.

    While it is open the model object is kvos's: its attention implementation is ``kvos`` and, on the CPU, its linear
    layers compute from packed copies of the weights. ``close`` undoes both, and puts a model back into training mode
    that came in it.

    Args:
        model: a supported model; checked here, before anything is changed.
        block_size: tokens per block of the layout, one of ``BLOCK_SIZES``.
        model_name: for messages and saved files.
        owns_model: nobody uses the model but through this engine, so weights that were packed need no plain copy
            beside them until ``close`` brings it back. Costs an ``identity`` at the start.
        kernels: ``auto`` takes what this machine has and what pays; ``generic`` is plain PyTorch; or a
            ``Kernels`` to choose one by one.
        kernel_folder: where compiled kernels are kept between processes; None compiles in each (seconds).
        deterministic: batch-invariant: the same token ids give the same bits, whatever else is in the batch, however
            they are cut into chunks, and whatever was cached. On the CPU; slower.
        untested: take a model type that nobody has tested, if it passes a thorough trial run.

    Raises:
        UnsupportedModelError: the model needs a feature that is missing, or does something that a trial run shows
            kvos does not know; the text names it.
        MissingDependencyError: a kernel was asked for by name and cannot be had.
        EngineContractError: the trial run did not go through kvos in every layer. After any error the model is as
            before.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        block_size: int = 16,
        model_name: str = "model",
        owns_model: bool = False,
        kernels: Kernels | Literal["auto", "generic"] = "auto",
        kernel_folder: Path | None = None,
        untested: bool = False,
        deterministic: bool = False,
    ) -> None:
        dtype = check_model(model, untested=untested)
        config = model.config
        if config._attn_implementation == ATTENTION_NAME:
            raise UnsupportedModelError(
                f"{type(model).__name__} is in use by a kvos engine already: close that first, or open a copy"
            )
        if deterministic:
            check_deterministic(model)
            kernels = _without_compiled_attention(kernels)
        self.info = EngineInfo(
            model_name, config.vocab_size, context_of(config), config.num_hidden_layers, dtype, deterministic
        )
        self._model = model
        self._device = model.device
        self._pool: BlockPool | None = None
        self._identity: str | None = None
        self._modes = [(module, module.training) for module in model.modules()]
        self._attention_before = config._attn_implementation
        self._closed = self._restored = False
        self._kernels: KernelSet | None = None
        self._rope: DeclaredRope | None = None
        try:
            model.eval()
            layers = self._layers = probe_layers(model)
            self.layout = layout_from(layers, block_size, dtype)
            if owns_model:
                self.identity()  # while all weights are there
            thorough = config.model_type not in ARCHITECTURES or is_changed_by_hand(model)
            trial = Trial.of(model, layers, thorough=thorough)
            self._kernels = select_kernels(
                kernels, model, layers, self.layout, drop_plain_weights=owns_model, folder=kernel_folder
            )
            model.set_attn_implementation(ATTENTION_NAME)
            self._rope = DeclaredRope(model)
            trial.check(self._run, self.layout, self._device, model_name)
            if deterministic:
                check_bits(self._run, self.layout, self.info)
        except BaseException:
            self.close()
            raise

    @property
    def kernels(self) -> Kernels:
        """What was chosen: every field names a kernel, none is ``auto``."""
        return self._selected().chosen

    def _selected(self) -> KernelSet:
        if self._kernels is None:
            raise EngineContractError("the engine was never opened")
        return self._kernels

    def attach(self, pool: BlockPool) -> None:
        if pool.layout != self.layout:
            raise EngineContractError(f"the pool's layout {pool.layout} is not that of the model, {self.layout}")
        if pool.device.type != self._device.type:
            raise EngineContractError(f"the pool is on {pool.device}, the model on {self._device}")
        self._pool = pool

    @torch.inference_mode()
    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """As the protocol says. The logits are an inference tensor: clone them to change them outside that mode."""
        if self._pool is None:
            raise EngineContractError("the engine is closed, or has no pool: attach one first")
        return self._run(batch, self._pool)

    def _run(self, batch: PackedBatch, pool: BlockPool) -> torch.Tensor:
        if self._closed or self._model.config._attn_implementation != ATTENTION_NAME:
            raise EngineContractError(
                f"the model's attention is {self._model.config._attn_implementation!r}, not {ATTENTION_NAME!r}: "
                "the engine was closed, or someone changed the model object"
            )
        check_batch(batch, pool)
        deterministic = self.info.deterministic
        outputs = len(batch.logit_rows)
        if deterministic:
            batch = padded(batch)
        kernel = self._selected().decode_kernel(batch, pool)
        plan = BatchPlan(batch, pool, compiled=kernel is not None, row_by_row=deterministic)
        if self._rope is not None:
            self._rope.prepare(_per_row(batch))
        forward = PackedForward(plan, pool, self._layers, kernel)
        with running(forward), row_by_row() if deterministic else nullcontext():
            output = self._model(
                input_ids=self._tensor(batch.token_ids.astype(np.int64))[None],
                position_ids=self._tensor(batch.positions)[None],
                use_cache=False,
                return_dict=True,
                logits_to_keep=self._tensor(batch.logit_rows),
            )
        forward.finish()
        if output.logits.shape[1] != len(batch.logit_rows):
            raise EngineContractError(
                f"{self.info.model_name} answered with {output.logits.shape[1]} rows of logits, "
                f"{len(batch.logit_rows)} were asked for: its forward ignores logits_to_keep"
            )
        logits: torch.Tensor = output.logits[0, :outputs]
        return logits if logits.dtype == torch.float64 else logits.float()

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)

    @property
    def arithmetic(self) -> str:
        if not self.info.deterministic:
            return ""
        recipe = f"{self.kernels.linear} linear, {self.kernels.norm} norm, {torch.get_num_threads()} threads"
        machine = f"torch {torch.__version__}, transformers {transformers.__version__}, {get_cpu_capability()}"
        return f"deterministic, {recipe}, {machine}"

    def position_class(self, max_tokens: int) -> str:
        return "" if self._rope is None else self._rope.position_class(max_tokens)

    def identity(self) -> str:
        if self._identity is None:
            self._identity = model_identity(self._model)
        return self._identity

    def close(self) -> None:
        if self._restored:
            return
        self._closed = True
        self._pool = None
        with ExitStack() as steps:  # each of them, whatever becomes of another
            steps.callback(self._restore_modes)
            steps.callback(self._restore_attention)
            if self._rope is not None:
                steps.callback(self._rope.undo)
            if self._kernels is not None:
                steps.callback(self._kernels.undo)
        self._restored = True  # last, so that who interrupted it can call again

    def _restore_attention(self) -> None:
        if self._model.config._attn_implementation == ATTENTION_NAME:
            self._model.set_attn_implementation(self._attention_before)

    def _restore_modes(self) -> None:
        for module, training in self._modes:
            module.training = training


def _per_row(batch: PackedBatch) -> npt.NDArray[np.int64]:
    """The declared length of each row's sequence."""
    lengths = batch.context_lengths if batch.declared_lengths is None else batch.declared_lengths
    return np.repeat(lengths, np.diff(batch.query_starts))


def _without_compiled_attention(kernels: Kernels | Literal["auto", "generic"]) -> Kernels | Literal["generic"]:
    """The compiled attention kernel adds up in another order than one call per row."""
    if kernels == "auto":
        return Kernels(attention="generic")
    if isinstance(kernels, Kernels) and kernels.attention == "numba":
        raise InvalidConfigError("the numba attention kernel is not for deterministic mode; use attention='auto'")
    return replace(kernels, attention="generic") if isinstance(kernels, Kernels) else kernels
