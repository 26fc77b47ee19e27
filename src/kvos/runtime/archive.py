"""Between an open session and a ``SavedSession``: the only place where a session's KV leaves or enters the pool."""

from __future__ import annotations

import logging

import numpy as np
import torch

from kvos.engine import weights_of
from kvos.errors import ContextLengthExceededError, SessionFileDamagedError, SessionFileMismatchError
from kvos.runtime.parts import RuntimeParts
from kvos.serving import EngineCore
from kvos.sessions import CacheSession, SavedSession, SessionManifest

__all__ = ["check_loadable", "describe_session", "export_session", "import_session", "reopen_session"]

_logger = logging.getLogger(__name__)


def export_session(core: EngineCore, session: CacheSession, parts: RuntimeParts, identity: str) -> SavedSession:
    """A copy of everything that ``session`` is, on the CPU. Engine thread.

    Raises:
        SessionBusyError, SessionClosedError: see ``CacheSession``.
    """
    session.check_idle()
    sequence, declared = session.sequence, session.limits.declared
    if session.is_swapped_out:
        sequence.adopt_prefix()
    slots = sequence.slots()
    layers = [core.manager.pool.read(layer, slots) for layer in range(core.manager.pool.layout.num_layers)]
    manifest = SessionManifest(
        name=session.id,
        tenant=session.tenant,
        num_tokens=sequence.num_tokens,
        num_computed=sequence.num_computed,
        transcript=session.transcript,
        # Without a wish, and where positions do not depend on it, the next runtime's own limit is as good.
        max_tokens=declared if declared != parts.limits.declared or core.engine.position_class(declared) else None,
    )
    return SavedSession(
        manifest=manifest,
        model=identity,
        model_name=core.engine.info.model_name,
        numeric_class=parts.numeric_class(declared),
        tokens=sequence.tokens().copy(),
        keys=[key.cpu() for key, _ in layers],
        values=[value.cpu() for _, value in layers],
    )


def describe_session(core: EngineCore, session: CacheSession, parts: RuntimeParts, identity: str) -> SavedSession:
    """Everything that an idle ``session`` is but its KV. Engine thread. Raises as ``export_session``."""
    session.check_idle()
    declared = session.limits.declared
    manifest = SessionManifest(
        name=session.id,
        tenant=session.tenant,
        num_tokens=session.sequence.num_tokens,
        num_computed=0,
        transcript=session.transcript,
        max_tokens=declared if declared != parts.limits.declared or core.engine.position_class(declared) else None,
    )
    numbers, name = parts.numeric_class(declared), core.engine.info.model_name
    return SavedSession(manifest, identity, name, numbers, session.sequence.tokens().copy(), keys=(), values=())


def reopen_session(core: EngineCore, saved: SavedSession, parts: RuntimeParts, name: str, tenant: str) -> CacheSession:
    """Open what ``describe_session`` described; nothing is computed yet. Engine thread.

    Raises:
        SessionExistsError: the name is taken.
    """
    session = parts.open_session(core, name, tenant, saved.manifest.max_tokens)
    try:
        session.restore(saved.manifest.transcript, saved.tokens)
    except BaseException:
        core.forget(session)
        raise
    return session


def check_loadable(saved: SavedSession, parts: RuntimeParts, identity: str, tenant: str) -> None:
    """Whether this runtime can go on with ``saved`` for ``tenant`` at all. Any thread.

    Raises:
        SessionFileMismatchError: it belongs to another tenant or another model.
        SessionFileDamagedError: token ids that the model does not have.
        ContextLengthExceededError: it is longer than this runtime's context.
    """
    if saved.manifest.tenant != tenant:
        raise SessionFileMismatchError(
            f"the session was saved for tenant {saved.manifest.tenant!r}, and this load is for tenant {tenant!r}; "
            f"if that is meant, load it with tenant={saved.manifest.tenant!r}"
        )
    if weights_of(saved.model) != weights_of(identity):
        raise SessionFileMismatchError(
            f"the session was saved with model {saved.model_name!r} ({saved.model[:12]}); "
            f"this runtime runs {parts.engine.info.model_name!r} ({identity[:12]}). Open that model to load it."
        )
    tokens = saved.tokens
    if len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) >= parts.limits.vocab_size):
        raise SessionFileDamagedError("the session holds token ids outside the model's vocabulary")
    if len(tokens) > parts.limits.max_tokens:
        raise ContextLengthExceededError(
            f"the session holds {len(tokens)} tokens; this runtime's context is {parts.limits.max_tokens}"
        )


def import_session(core: EngineCore, saved: SavedSession, parts: RuntimeParts, name: str, tenant: str) -> CacheSession:
    """Open ``saved`` as a session: share what the pool has already, write the rest of its KV. Engine thread.

    KV that this runtime can't use (damaged, another dtype, another shape) is left out, and computed when it is needed.

    Raises:
        SessionExistsError: the name is taken.
        OutOfBlocksError: it does not fit; nothing was opened.
    """
    session = parts.open_session(core, name, tenant, saved.manifest.max_tokens)
    try:
        session.restore(saved.manifest.transcript, saved.tokens)
        session.sequence.adopt_prefix()
        obstacle = kv_obstacle(core, saved, parts.numeric_class(session.limits.declared), parts.identity())
        if obstacle is None:
            _write_kv(core, session, saved)
        else:
            session.saved_kv_unusable = True
            _logger.warning("session %s was loaded, and will be computed again: %s", name, obstacle)
    except BaseException:
        core.forget(session)
        raise
    return session


def kv_obstacle(core: EngineCore, saved: SavedSession, numeric_class: str, identity: str) -> str | None:
    """Why the saved KV is not used here; None if it is."""
    if saved.kv_problem is not None:
        return saved.kv_problem
    if saved.manifest.num_computed == 0:
        return None
    if saved.model != identity:
        return "saved with the same weights under another config, or by another version of Transformers"
    if saved.numeric_class != numeric_class:
        return f"saved in {saved.numeric_class}, this runtime computes in {numeric_class}"
    layout = core.manager.pool.layout
    tokens = saved.manifest.num_computed
    for name, tensors, sizes in (
        ("keys", saved.keys, [(tokens, spec.kv_heads, spec.k_dim) for spec in layout.layers]),
        ("values", saved.values, [(tokens, spec.kv_heads, spec.v_dim) for spec in layout.layers]),
    ):
        if [tuple(tensor.shape) for tensor in tensors] != sizes or any(t.dtype != layout.dtype for t in tensors):
            return f"{name} were saved in another shape than the model's"
    return None


def _write_kv(core: EngineCore, session: CacheSession, saved: SavedSession) -> None:
    sequence = session.sequence
    missing = saved.manifest.num_computed - sequence.num_computed
    if missing <= 0:
        return
    session.begin()  # an idle session's blocks may be taken while this one looks for room
    try:
        plan = sequence.prepare_write(missing)
    finally:
        session.end()
    rows = torch.from_numpy(np.arange(plan.start, plan.end))
    pool = core.manager.pool
    for layer, (key, value) in enumerate(zip(saved.keys, saved.values, strict=True)):
        pool.write(layer, plan.slots, key[rows].to(pool.device), value[rows].to(pool.device))
    sequence.complete_write(plan)
