"""The tier on a local disk: packs of checked records, and an SQLite catalog that says where each block is."""

from __future__ import annotations

from kvos.tiers.disk.tier import DiskTier

__all__ = ["DiskTier"]
