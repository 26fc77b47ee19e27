"""Every error that kvos raises on purpose.

KvosError
├── ClientError                       the caller can fix it (HTTP 4xx)
│   ├── InvalidInputError             400  a value that no state of the system could accept
│   │   ├── InvalidMessageError            empty list, unknown role, null or non-text content
│   │   ├── InvalidTokenError              a token id outside the vocabulary
│   │   └── InvalidConfigError             a setting out of its range
│   ├── ContextLengthExceededError    400  more tokens than the model or the pool can ever hold
│   ├── UnsupportedModelError         422  the model needs a feature that this engine lacks; named
│   ├── ModelNotAvailableError        404  no weights on this machine; the text says how to get them
│   ├── SessionNotFoundError          404
│   ├── SessionExistsError            409  the name is taken
│   ├── SessionBusyError              409  a generation is running on this session
│   ├── SessionConflictError          409  somebody else changed the session meanwhile
│   ├── SessionClosedError            410
│   └── SessionFileError              422  a saved session that cannot be used
│       ├── SessionFileMismatchError       it belongs to another model
│       └── SessionFileDamagedError        its bytes are not what was written
└── ServerError                       kvos or its machine is at fault (HTTP 5xx)
    ├── OutOfBlocksError              503  no free block; says who holds them
    ├── BlockStateError               500  the block life cycle was violated
    │   ├── AllocateNonFreeBlockError
    │   ├── ReleaseFreeBlockError
    │   ├── DoubleReleaseError
    │   ├── SharedBlockWriteError
    │   └── UseAfterFreeError
    ├── EngineContractError           500  a forward pass did not do what kvos relies on
    ├── EngineStoppedError            503  the engine thread has ended
    ├── TierTimeoutError              503  a lower tier has not taken what was to be kept
    ├── ModelDamagedError             500  converted weights fail their checksum
    ├── ModelFetchError               502  the model package could not be fetched
    └── MissingDependencyError        501  an optional package is needed; the text names the extra

An error names the thing (session, block, file), what was expected, and what to do.
"""

from __future__ import annotations

__all__ = [
    "AllocateNonFreeBlockError",
    "BlockStateError",
    "ClientError",
    "ContextLengthExceededError",
    "DoubleReleaseError",
    "EngineContractError",
    "EngineStoppedError",
    "InvalidConfigError",
    "InvalidInputError",
    "InvalidMessageError",
    "InvalidTokenError",
    "KvosError",
    "MissingDependencyError",
    "ModelDamagedError",
    "ModelFetchError",
    "ModelNotAvailableError",
    "OutOfBlocksError",
    "ReleaseFreeBlockError",
    "ServerError",
    "SessionBusyError",
    "SessionClosedError",
    "SessionConflictError",
    "SessionExistsError",
    "SessionFileDamagedError",
    "SessionFileError",
    "SessionFileMismatchError",
    "SessionNotFoundError",
    "SharedBlockWriteError",
    "TierTimeoutError",
    "UnsupportedModelError",
    "UseAfterFreeError",
]


class KvosError(Exception):
    """Root of every error that kvos raises on purpose."""

    http_status = 500


class ClientError(KvosError):
    """The caller can fix it."""

    http_status = 400


class InvalidInputError(ClientError, ValueError):
    """A value that no state of the system could accept. Nothing was changed."""


class InvalidMessageError(InvalidInputError):
    """A chat message that cannot be rendered: empty, unknown role, null content."""


class InvalidTokenError(InvalidInputError):
    """A token id outside the model's vocabulary."""


class InvalidConfigError(InvalidInputError):
    """A setting outside its range."""


class ContextLengthExceededError(ClientError):
    """More tokens than the model's context, or the whole pool, can ever hold."""


class UnsupportedModelError(ClientError):
    """The model needs a feature that the engine does not have; the text names it."""

    http_status = 422


class ModelNotAvailableError(ClientError):
    """The weights are not on this machine; the text says how to get them."""

    http_status = 404


class SessionNotFoundError(ClientError):
    """No open or saved session has this name."""

    http_status = 404


class SessionExistsError(ClientError):
    """An open session has this name already."""

    http_status = 409


class SessionBusyError(ClientError):
    """A generation is running on this session; wait for it or cancel it."""

    http_status = 409


class SessionConflictError(ClientError):
    """The session changed between reading it and writing to it."""

    http_status = 409


class SessionClosedError(ClientError):
    """The session was closed; open or load another one."""

    http_status = 410


class SessionFileError(ClientError):
    """A saved session that cannot be used."""

    http_status = 422


class SessionFileMismatchError(SessionFileError):
    """The file belongs to another model; the text names both."""


class SessionFileDamagedError(SessionFileError):
    """The bytes of the file are not the bytes that were written."""


class ServerError(KvosError):
    """kvos or its machine is at fault."""


class OutOfBlocksError(ServerError):
    """No free block is left, and nothing could be reclaimed.

    Attributes:
        asked, free, cached, held: block counts at the time of the request.
        holders: ``(owner name, blocks)`` pairs, largest first.
    """

    http_status = 503

    def __init__(
        self, asked: int, free: int, cached: int, held: int, holders: tuple[tuple[str, int], ...] = ()
    ) -> None:
        self.asked = asked
        self.free = free
        self.cached = cached
        self.held = held
        self.holders = holders
        by_whom = ", ".join(f"{name}: {blocks}" for name, blocks in holders) or "nobody named"
        super().__init__(
            f"out of KV blocks: asked for {asked}, {free} free, {cached} cached, {held} held ({by_whom}). "
            "Close or truncate a session, or give the cache more memory (cache_bytes)."
        )


class BlockStateError(ServerError):
    """The life cycle of a block was violated: a bug in the caller of the storage layer."""


class AllocateNonFreeBlockError(BlockStateError):
    """The free queue offered a block whose status is not ``FREE``."""


class ReleaseFreeBlockError(BlockStateError):
    """A block that is in the free queue was released."""


class DoubleReleaseError(BlockStateError):
    """A block was released more often than it was held."""


class SharedBlockWriteError(BlockStateError):
    """A write to a block that two tables hold, that a transfer reads, or that is published."""


class UseAfterFreeError(BlockStateError):
    """A read, write or retain of a block that nobody holds any more."""


class EngineContractError(ServerError):
    """A forward pass did not do what kvos relies on (attention calls, layers, shapes)."""


class EngineStoppedError(ServerError):
    """The engine thread has ended; open a new runtime."""

    http_status = 503


class TierTimeoutError(ServerError):
    """A lower tier did not take in time what a caller waits to have there; nothing was lost."""

    http_status = 503


class ModelDamagedError(ServerError):
    """Converted weights do not match their checksum; fetch the model again."""


class ModelFetchError(ServerError):
    """The package that holds the model could not be fetched."""

    http_status = 502


class MissingDependencyError(ServerError):
    """An optional package is needed; the text names the extra that brings it."""

    http_status = 501
