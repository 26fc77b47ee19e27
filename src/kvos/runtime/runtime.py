"""The public facade: one model, one pool, one engine thread, many sessions."""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch

from kvos.config import KvosConfig
from kvos.engine import Engine, TransformersEngine
from kvos.errors import InvalidConfigError, InvalidInputError, SessionFileDamagedError
from kvos.models.load import LoadedModel, load_model
from kvos.models.memory import default_cache_bytes
from kvos.policy import POLICIES
from kvos.policy.residency import ResidencyRules
from kvos.residency import Residency, TierReport
from kvos.runtime.aio import AsyncSession
from kvos.runtime.archive import check_loadable, import_session, reopen_session
from kvos.runtime.lower_tiers import open_secret, open_tiers
from kvos.runtime.parts import RuntimeParts, check_name
from kvos.runtime.published import StatsPublisher
from kvos.runtime.report import (
    BlockReport,
    RuntimeStats,
    SessionReport,
    block_report,
    runtime_stats,
    session_report,
)
from kvos.runtime.session import Session
from kvos.runtime.session_file import read_session
from kvos.sequences import BlockHasher, BlockManager, Compactor
from kvos.serving import EngineCore, EngineThread, StepBudget
from kvos.sessions import CacheSession, ChatRenderer, MessageInput, SavedSession, SessionLimits
from kvos.storage import BlockPool
from kvos.types import shown

__all__ = ["DEFAULT_MODEL", "DEFAULT_TENANT", "Runtime", "open_runtime"]

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_TENANT = "default"

T = TypeVar("T")


class Runtime:
    """Made by ``kvos.open``; use it in a ``with`` block, or call ``close``. Any thread.

    Args:
        engine: a model over block tables; closed with the runtime.
        tokenizer: with the model's chat template.
        config: settings; sizes of pool and steps are taken from here.
        eos_ids: tokens that end a reply.
    """

    def __init__(
        self, engine: Engine, tokenizer: Any, *, config: KvosConfig, eos_ids: frozenset[int], device: torch.device
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        renderer = ChatRenderer(tokenizer)
        pool = _make_pool(engine, config, device)
        engine.attach(pool)
        secret = open_secret(config, pool)
        tiers = () if secret is None else open_tiers(config, pool, engine.info.model_name)
        manager = BlockManager(pool, BlockHasher(secret or secrets.token_bytes(32)), policy=POLICIES[config.eviction]())
        residency = None
        if tiers:
            residency = Residency(manager, tiers, restore_deadline_s=config.restore_deadline_ms / 1000)
        core = EngineCore(
            engine,
            manager,
            budget=StepBudget(
                tokens=config.max_batch_tokens,
                prefill_chunk=config.prefill_chunk_tokens,
                prefill_beside_decodes=config.prefill_beside_decodes_tokens,
                sequences=config.max_running,
            ),
            decode=_decoder(tokenizer),
            eos_ids=eos_ids,
            residency=residency,
            compactor=Compactor() if config.compaction else None,
            rules=_rules(config),
        )
        self._parts = RuntimeParts(
            engine=engine,
            thread=EngineThread(core),
            renderer=renderer,
            limits=_limits(engine, config, pool),
            sessions_folder=config.home / "sessions",
            lasting=residency is not None,
            exactness=config.exactness,
        )
        thread = self._parts.thread
        publisher = StatsPublisher(config.home / "run", lambda: thread.call(runtime_stats).as_dict())
        if config.publish_stats:
            publisher.start()
        # A daemon thread inside torch while the interpreter ends can crash it: end it first, if nobody did. Sessions
        # hold the parts, so a runtime lives as long as its last session.
        self._shut_down = weakref.finalize(self._parts, _shut_down, publisher, thread, residency, engine)

    # -- sessions ------------------------------------------------------------------------------------------------

    def session(
        self,
        name: str | None = None,
        *,
        tenant: str = DEFAULT_TENANT,
        messages: MessageInput | None = None,
        max_tokens: int | None = None,
    ) -> Session:
        """Open a session; without a name it gets one. It holds its blocks until it is closed.

        Args:
            max_tokens: how long it may become at most; by default as long as the runtime allows. Forks have the same.
                For models whose positions depend on the length (dynamic and longrope RoPE) this is the length that
                they are computed for; by default the model's context, or ``max_context_tokens``.

        Raises:
            SessionExistsError: an open session has that name.
            InvalidInputError: not a name, or more ``max_tokens`` than the model's context or the setting allow.
            InvalidMessageError: of ``messages``; no session was opened.
        """
        if name is not None:
            check_name("session", name)
        check_name("tenant", tenant)
        _check_max_tokens(max_tokens, self._parts.limits.declared)
        self._parts.get_ready()
        session = Session(
            self._parts, self._call(lambda core: self._parts.open_session(core, name, tenant, max_tokens))
        )
        if messages is not None:
            try:
                session.append(messages)
            except BaseException:
                session.close()
                raise
        return session

    def async_session(
        self, name: str | None = None, *, tenant: str = DEFAULT_TENANT, max_tokens: int | None = None
    ) -> AsyncSession:
        """The same for asyncio; returns at once."""
        return AsyncSession(self.session(name, tenant=tenant, max_tokens=max_tokens))

    def get(self, name: str) -> Session:
        """The open session of that name; raises SessionNotFoundError, or InvalidInputError if it isn't text."""
        if not isinstance(name, str):
            raise InvalidInputError(f"a session's name is text, got {name!r}")
        return Session(self._parts, self._call(lambda core: core.sessions.get(name)))

    def load(self, source: str | Path, *, name: str | None = None, tenant: str = DEFAULT_TENANT) -> Session:
        """Open a saved session, by name or from a file if ``source`` is a ``Path``, and go on with it.

        Args:
            name: for the open session; by default the name that it is saved under, or the file's.

        Raises:
            SessionNotFoundError: nothing is saved there.
            SessionFileMismatchError: it belongs to another model or another tenant.
            SessionFileDamagedError: it is not what was written.
            SessionExistsError: an open session has that name.
            ContextLengthExceededError, OutOfBlocksError
        """
        check_name("tenant", tenant)
        if isinstance(source, Path):
            saved, stem = read_session(source), source.stem
        else:
            saved, stem = self._parts.store(tenant).get(source), source
        identity = self._parts.identity()
        check_loadable(saved, self._parts, identity, tenant)
        wish = check_name("session", stem if name is None else name)
        return self._open_saved(saved, wish, tenant)

    def _open_saved(self, saved: SavedSession, name: str, tenant: str) -> Session:
        inner = self._call(lambda core: import_session(core, saved, self._parts, name, tenant))
        return Session(self._parts, inner)

    def resume(self, name: str, *, tenant: str = DEFAULT_TENANT) -> Session:
        """Open a session that was hibernated, here or in an earlier process, and go on with it.

        Its blocks come back from lower tiers with its next ``generate`` or ``prefill``; what they no longer have is
        computed again.

        Raises:
            SessionNotFoundError: no session of that name was hibernated.
            SessionFileMismatchError: it belongs to another model.
            SessionFileDamagedError: its description is not what was written.
            SessionExistsError: an open session of another tenant has that name.
            ContextLengthExceededError: it is longer than this runtime's context.
        """
        check_name("session", name)
        check_name("tenant", tenant)
        opened = self._call(lambda core: core.sessions.find(name, tenant))
        if opened is not None:
            return Session(self._parts, opened)
        saved = self._parts.hibernated(tenant).get(name)
        if saved.manifest.name != name:
            raise SessionFileDamagedError(f"where session {name!r} should be described, {saved.manifest.name!r} is")
        self._parts.get_ready()
        check_loadable(saved, self._parts, self._parts.identity(), tenant)

        def reopen(core: EngineCore) -> CacheSession:
            opened = core.sessions.find(name, tenant)  # another thread may have been faster
            return reopen_session(core, saved, self._parts, name, tenant) if opened is None else opened

        return Session(self._parts, self._call(reopen))

    def hibernated_sessions(self, tenant: str = DEFAULT_TENANT) -> tuple[str, ...]:
        """Names of sessions that were hibernated and not forgotten."""
        return self._parts.hibernated(tenant).names()

    def forget_hibernated(self, name: str, tenant: str = DEFAULT_TENANT) -> None:
        """Forget a hibernated session; its blocks stay as long as there is room. Raises SessionNotFoundError."""
        self._parts.hibernated(tenant).delete(name)

    def tiers(self) -> tuple[TierReport, ...]:
        """The tiers below the device, fast to slow: how full they are, how fast, and whether one is switched off."""
        return self._call(lambda core: () if core.moves.residency is None else core.moves.residency.report())

    def saved_sessions(self, tenant: str = DEFAULT_TENANT) -> tuple[str, ...]:
        """Names under which sessions are saved."""
        return self._parts.store(tenant).names()

    def delete_saved(self, name: str, tenant: str = DEFAULT_TENANT) -> None:
        """Forget a saved session; raises SessionNotFoundError."""
        self._parts.store(tenant).delete(name)

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def max_context_tokens(self) -> int:
        """The longest session, in tokens."""
        return self._parts.limits.max_tokens

    @property
    def model_name(self) -> str:
        return self._parts.engine.info.model_name

    def check_chats(self) -> None:
        """Raises UnsupportedModelError if the model can't take messages, for want of a chat template."""
        self._parts.renderer.check_template()

    def stats(self) -> RuntimeStats:
        """Counters, blocks by status, utilisation."""
        return self._call(runtime_stats)

    def sessions(self) -> tuple[SessionReport, ...]:
        """Every open session with its blocks."""
        return self._call(lambda core: tuple(session_report(core, session) for session in core.sessions))

    def blocks(self) -> tuple[BlockReport, ...]:
        """Every block in use with what it holds of which session."""
        return self._call(block_report)

    def inspect(self, work: Callable[[EngineCore], T]) -> T:
        """Run ``work`` on the engine thread, between two steps; for measurements and tests. No stable API below it.

        Raises:
            EngineContractError: ``work`` called the runtime or a session again; it has the core that it is given.
        """
        return self._call(work)

    def check_invariants(self) -> None:
        """Raises AssertionError if the cache contradicts itself; for tests and for the curious."""
        self._call(lambda core: core.check_invariants())

    # -- end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancel what runs, end the engine thread, give the model object back as it was. Idempotent.

        Interrupted (Ctrl-C), it can be called again; every part of it is idempotent, too.
        """
        alive = self._shut_down.peek()
        if alive is not None:
            _, shut_down, arguments, _ = alive
            shut_down(*arguments)
            self._shut_down.detach()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, work: Callable[[EngineCore], T]) -> T:
        return self._parts.thread.call(work)


def open_runtime(
    model: str | os.PathLike[str] | Any = DEFAULT_MODEL,
    *,
    tokenizer: Any = None,
    config: KvosConfig | None = None,
    **settings: Any,
) -> Runtime:
    """Open a model and put a cache under it.

    Args:
        model: a name (``smollm2-135m``), a folder, a hub id, or a Transformers model object.
        tokenizer: with a model object, its tokenizer.
        config: all settings; or give single ones as keywords (``dtype="fp64"``), see ``KvosConfig``.

    Raises:
        InvalidConfigError: an unknown or impossible setting.
        ModelNotAvailableError: the text says how to get the model.
        UnsupportedModelError: the model needs a feature that is missing; the text names it.
    """
    if config is not None and settings:
        raise InvalidConfigError("give either a KvosConfig or single settings, not both")
    if config is not None and not isinstance(config, KvosConfig):
        raise InvalidConfigError(f"config is a {type(config).__name__}; expected a KvosConfig")
    chosen = KvosConfig.from_env(**settings) if config is None else config
    if chosen.threads is not None:
        torch.set_num_threads(chosen.threads)
    if isinstance(model, str | os.PathLike):
        loaded = load_model(model, config=chosen, tokenizer=tokenizer)
    else:
        loaded = load_model(config=chosen, model=model, tokenizer=tokenizer)
    engine = TransformersEngine(
        loaded.model,
        block_size=chosen.block_size,
        model_name=loaded.name,
        owns_model=loaded.owned,
        kernels=chosen.kernels,
        kernel_folder=chosen.home / "kernels",
        untested=chosen.untested_models,
        deterministic=chosen.deterministic,
    )
    try:
        return Runtime(engine, loaded.tokenizer, config=chosen, eos_ids=_eos_ids(loaded), device=loaded.device)
    except BaseException:
        engine.close()
        raise


def _check_max_tokens(wish: int | None, most: int) -> None:
    if wish is None:
        return
    if isinstance(wish, bool) or not isinstance(wish, int) or not 1 <= wish <= most:
        raise InvalidInputError(
            f"max_tokens is {shown(wish)}; expected a whole number from 1 to {most}, the longest session that the "
            "model and max_context_tokens allow"
        )


def _shut_down(publisher: StatsPublisher, thread: EngineThread, residency: Residency | None, engine: Engine) -> None:
    publisher.stop()
    thread.stop()
    if residency is not None:
        residency.close()
    engine.close()


def _make_pool(engine: Engine, config: KvosConfig, device: torch.device) -> BlockPool:
    cache_bytes = default_cache_bytes(device) if config.cache_bytes is None else config.cache_bytes
    per_block = engine.layout.bytes_per_block
    max_blocks = cache_bytes // per_block
    if max_blocks < 1:
        raise InvalidConfigError(f"cache_bytes is {cache_bytes}; one block of this model takes {per_block} bytes")
    per_segment = max(1, min(config.segment_bytes, cache_bytes) // per_block)
    return BlockPool(engine.layout, max_blocks=max_blocks, blocks_per_segment=per_segment, device=device)


def _rules(config: KvosConfig) -> ResidencyRules:
    return ResidencyRules(
        high=config.high_watermark_percent / 100,
        low=config.low_watermark_percent / 100,
        min_stay_s=config.min_residency_s,
        dense_stay_s=4 * config.min_residency_s,
        sessions=config.max_resident_sessions,
    )


def _limits(engine: Engine, config: KvosConfig, pool: BlockPool) -> SessionLimits:
    """The longest session: what the model, the setting and the whole pool allow.

    How much memory there is must not change what a model computes, so the pool has no say in the declared length.
    """
    declared = engine.info.max_positions
    if config.max_context_tokens is not None:
        declared = min(declared, config.max_context_tokens)
    longest = min(declared, pool.max_blocks * pool.layout.block_size)
    return SessionLimits(longest, engine.info.vocab_size, declared)


def _decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    return decode


def _eos_ids(loaded: LoadedModel) -> frozenset[int]:
    """What ends a reply: by the tokenizer, and by the model's generation config."""
    config = getattr(loaded.model, "generation_config", None)
    listed = getattr(config, "eos_token_id", None)
    ids = [listed] if isinstance(listed, int) else list(listed or [])
    return frozenset(int(i) for i in (*ids, loaded.tokenizer.eos_token_id) if i is not None)
