"""What the model would say next, kept with the sequences for which it is known. Engine thread only."""

from __future__ import annotations

import torch

from kvos.sequences import SequenceCache
from kvos.types import SequenceId

__all__ = ["KnownLogits"]


class KnownLogits:
    """Logits ``[vocab]`` behind a sequence's last token, each good for one revision of it."""

    def __init__(self) -> None:
        self._known: dict[SequenceId, tuple[int, torch.Tensor]] = {}

    def remember(self, sequence: SequenceCache, logits: torch.Tensor) -> None:
        """Keep a copy of ``logits``."""
        self._known[sequence.id] = (sequence.revision, logits.clone())

    def inherit(self, parent: SequenceCache, child: SequenceCache) -> None:
        """A fork knows what its parent's model would say next."""
        logits = self.get(parent)
        if logits is not None:
            self._known[child.id] = (child.revision, logits)

    def get(self, sequence: SequenceCache) -> torch.Tensor | None:
        """What is known of ``sequence`` as it is now; None if that is nothing."""
        known = self._known.get(sequence.id)
        return known[1] if known is not None and known[0] == sequence.revision else None

    def forget(self, sequence: SequenceCache) -> None:
        """Idempotent."""
        self._known.pop(sequence.id, None)
