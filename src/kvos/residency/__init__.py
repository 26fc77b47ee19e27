"""What lives in which tier, when it moves, and the threads that move it. Knows sequences and tiers, not who asks."""

from kvos.residency.breaker import CircuitBreaker
from kvos.residency.level import TierReport
from kvos.residency.mover import Mover, Priority, Transfer, TransferState
from kvos.residency.residency import PIECE_BLOCKS, Residency, Wake
from kvos.residency.restore import Restore, RestoreEnd
from kvos.residency.tickets import StoreSummary

__all__ = [
    "PIECE_BLOCKS",
    "CircuitBreaker",
    "Mover",
    "Priority",
    "Residency",
    "Restore",
    "RestoreEnd",
    "StoreSummary",
    "TierReport",
    "Transfer",
    "TransferState",
    "Wake",
]
