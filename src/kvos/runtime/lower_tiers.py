"""The tiers below the device, as the settings ask for them, and the secret that keeps addresses equal over restarts."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
from pathlib import Path

import psutil

from kvos.config import LOSSY_CODECS, KvosConfig
from kvos.errors import InvalidConfigError
from kvos.storage import BlockPool, KVLayout
from kvos.tiers import Codec, Tier
from kvos.tiers.codecs import LosslessCodec, QuantisedCodec, RawCodec
from kvos.tiers.disk import DiskTier
from kvos.tiers.disk.about import About, write_about
from kvos.tiers.disk.budget import capacity_beside
from kvos.tiers.disk.index import CATALOG_BYTES
from kvos.tiers.disk.pack import FORMAT
from kvos.tiers.host import HostTier
from kvos.tiers.late import LateTier

__all__ = ["make_codec", "master_secret", "open_secret", "open_tiers"]

_logger = logging.getLogger(__name__)

SECRET_BYTES = 32
LAYOUT_NAME_BYTES = 8

SHARE_OF_RAM = 0.25
"""Of what is free: the rest is for the model that loads next, and for everybody else."""

MOST_HOST_BYTES = 16 << 30
"""Unasked. The arena is allocated when a runtime opens, and page-locking takes a second for some GiB."""


def master_secret(home: Path) -> bytes:
    """The 32 bytes in ``home/secret``, made there the first time, with mode 0600; processes agree on one.

    Raises:
        OSError: it can be neither read nor written.
    """
    path = home / "secret"
    with contextlib.suppress(FileNotFoundError):
        return _read_secret(path)
    home.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"secret.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # whoever links first has made it
            os.link(new, path)
    finally:
        new.unlink(missing_ok=True)
    return _read_secret(path)


def _read_secret(path: Path) -> bytes:
    secret = path.read_bytes()
    if len(secret) != SECRET_BYTES:
        raise OSError(f"{path} holds {len(secret)} bytes and not {SECRET_BYTES}; remove it to get a new one")
    return secret


def open_secret(config: KvosConfig, pool: BlockPool) -> bytes | None:
    """The master secret if tiers are wanted and it can be had; None is no reason to fail, but one to go on without."""
    if config.disk_cache_bytes == 0 and _host_bytes(config, pool) == 0:
        return None
    try:
        return master_secret(config.home)
    except OSError as error:
        _logger.warning("going on without tiers below the device: %s", error)
        return None


def open_tiers(config: KvosConfig, pool: BlockPool, model_name: str) -> tuple[Tier, ...]:
    """Fast to slow. A tier that can't be opened is left out, or tried again later: a cache is no reason to fail.

    ``model_name`` is for people: it stands beside the blocks on disk.
    """
    tiers = (_open_host(config, pool), _open_disk(config, pool.layout, model_name))
    return tuple(tier for tier in tiers if tier is not None)


def _host_bytes(config: KvosConfig, pool: BlockPool) -> int:
    """What the host tier may take; 0 if it would hold no block."""
    size = config.host_cache_bytes
    if size is None:  # the same RAM as the device's needs no second tier
        most = min(MOST_HOST_BYTES, int(psutil.virtual_memory().available * SHARE_OF_RAM))
        size = min(pool.max_blocks * pool.layout.bytes_per_block, most) if pool.device.type != "cpu" else 0
    return 0 if size < pool.layout.bytes_per_block else size


def _open_host(config: KvosConfig, pool: BlockPool) -> Tier | None:
    size = _host_bytes(config, pool)
    if size == 0:
        return None
    try:
        return HostTier(pool.layout.bytes_per_block, size, make_codec(config.host_codec, pool.layout))
    except (MemoryError, RuntimeError) as error:
        _logger.warning("going on without a cache of %d bytes in host memory: %s", size, error)
        return None


def _open_disk(config: KvosConfig, layout: KVLayout, model_name: str) -> Tier | None:
    if config.disk_cache_bytes == 0:
        return None
    codec = make_codec(config.disk_codec, layout)
    folder = config.home / "blocks" / _layout_name(layout, codec)
    capacity = capacity_beside(folder.parent, folder.name, config.disk_cache_bytes)

    def open_it() -> Tier:
        tier = DiskTier(
            folder,
            capacity_bytes=capacity,
            bytes_per_block=layout.bytes_per_block,
            block_size=layout.block_size,
            codec=codec,
        )
        _describe(folder, layout, codec, model_name)
        return tier

    try:
        return open_it()
    except InvalidConfigError as error:
        _logger.warning("going on without a disk cache: %s", error)
    return LateTier("disk", capacity, open_it, lossless=codec.lossless) if capacity > CATALOG_BYTES else None


def _describe(folder: Path, layout: KVLayout, codec: Codec, model_name: str) -> None:
    """Say in the folder what it holds; for ``kvos cache``, and for whoever wonders."""
    about = About(
        models=(model_name,),
        dtype=str(layout.dtype).removeprefix("torch."),
        block_size=layout.block_size,
        layers=layout.num_layers,
        bytes_per_block=layout.bytes_per_block,
        codec=codec.name,
        format=FORMAT,
        pid=os.getpid(),
        process_started=psutil.Process().create_time(),
    )
    try:
        write_about(folder, about)
    except OSError as error:  # blocks are found by key; this is for people
        _logger.debug("%s does not say what it holds: %s", folder, error)


def make_codec(name: str, layout: KVLayout) -> Codec:
    """The codec that a setting names."""
    if name in LOSSY_CODECS:
        return QuantisedCodec(layout, int(name.removeprefix("int")))
    return RawCodec() if name == "raw" else LosslessCodec(layout)


def _layout_name(layout: KVLayout, codec: Codec) -> str:
    """Blocks of another shape, or written otherwise, lie in another folder."""
    return hashlib.blake2b(f"{layout} {codec.name}".encode(), digest_size=LAYOUT_NAME_BYTES).hexdigest()
