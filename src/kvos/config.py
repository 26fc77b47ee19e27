"""The settings, and the only place of kvos that reads the environment.

Deliberately knows nothing of torch: the names of devices and dtypes are resolved where they are used
(:mod:`kvos.models.dtypes`).
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import operator
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

import platformdirs

from kvos.errors import InvalidConfigError
from kvos.types import DType, shown

__all__ = ["ALLOWED_BLOCK_SIZES", "KvosConfig", "subprocess_environment", "tenant_folder_name"]

ALLOWED_BLOCK_SIZES = (8, 16, 32, 64, 128)
"""Tokens per block; the storage layer allows the same ones."""

CodecName = Literal["raw", "lossless", "int8", "int4"]
CODECS = get_args(CodecName)
LOSSY_CODECS = ("int8", "int4")

SWITCHES = ("compaction", "deterministic", "offline", "publish_stats", "untested_models")
"""Settings that are true or false."""

LONGEST_HEX = 200
"""File systems take 255 bytes for a folder's name."""

ENVIRONMENT_PREFIX = "KVOS_"

MOST_THREADS = 4096
MOST_TOKENS = 1 << 40
MOST_BYTES = 1 << 60
"""The upper bounds lie beyond any machine and any model; a larger number is a mistake."""

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
_SIZE = re.compile(r"(\d+)\s*(KiB|MiB|GiB)?", re.IGNORECASE)
LONGEST_NUMBER = 30
"""Digits; Python refuses to read a number of thousands."""

_UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_WORDS_FOR_TRUE = ("1", "true", "yes", "on")
_WORDS_FOR_FALSE = ("0", "false", "no", "off")
_logger = logging.getLogger(__name__)


def _default_home() -> Path:
    return Path(platformdirs.user_cache_dir("kvos", appauthor=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class KvosConfig:
    """Every setting of a runtime; frozen and validated.

    A setting ``name`` is read from ``KVOS_NAME`` by :meth:`from_env`; sizes may then carry ``KiB``, ``MiB`` or
    ``GiB``, ``none`` stands for ``None``, and an empty variable counts as not set.

    Attributes:
        home: folder of converted models and of whatever kvos keeps. Default: the user's cache folder by the
            convention of the platform, since all of it can be fetched or computed again.
        block_size: tokens per block, one of 8, 16, 32, 64, 128. Default 16: a fork copies at most 15 tokens, and the
            block table is still short. 8 suits many short forks, 32 and more suit long contexts on a GPU.
        dtype: ``auto``, ``fp32``, ``bf16``, ``fp16`` or ``fp64``. Default ``auto``: bf16 where the hardware computes in
            it, else fp32, because emulated bf16 is slower than fp32. ``fp64`` is for verification.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``. Default ``auto``: CUDA if there is one, else the CPU.
        cache_bytes: most bytes that KV blocks may take on the device. Default ``None``: decided at open from what is
            free then. CPU: a quarter, at most 4 GiB, because the machine is shared with other programs and 4 GiB hold
            90,000 tokens of the default model. GPU: three quarters, because the KV cache is what a GPU's memory is for.
        segment_bytes: bytes by which the pool grows. Default 256 MiB: small enough to find a place in fragmented
            memory, large enough that a few segments make a pool. A smaller ``cache_bytes`` wins.
        max_context_tokens: longest sequence, in tokens. Default ``None``: what the model was made for; a larger value
            is clipped to that.
        prefill_chunk_tokens: prompt tokens of one sequence in one step. Default 512: beyond that a CPU gains no
            throughput, and whoever decodes meanwhile waits longer for the step to end.
        prefill_beside_decodes_tokens: prompt tokens in one step while others decode. Default 64: their next token then
            comes within a fifth of a second on two CPU cores, and prefill still runs at nearly full speed.
        max_batch_tokens: new tokens of all sequences in one step. Default 512: one prefill chunk. It is at least
            ``max_running``, so that every sequence can decode in each step.
        max_running: sequences in one step. Default 32: more adds latency without throughput on a CPU.
        compaction: whether tables whose blocks lie scattered are moved together between steps, one a second at most.
            Default True: attention reads long runs faster.
        high_watermark_percent: of the pool; while more is held, idle sessions leave the device, the longest unused
            first. Default 85: room for a few thousand new tokens before somebody has to wait for it.
        low_watermark_percent: where they stop leaving. Default 60: a quarter of the pool at once, and then rest.
        min_residency_s: seconds that a session stays after its last use, unless a request needs its room. Default 30;
            in a dense dialogue (three turns within two minutes) it is four times as long.
        max_resident_sessions: so many sessions hold blocks; beyond that those unused for longest leave. Default 8.
        eviction: which cached block leaves a full pool first: ``expected-return`` or ``lru``. Default
            ``expected-return``: it learns when blocks are asked for again, and is LRU until it knows better.
        host_cache_bytes: most bytes of blocks in host memory, between device and disk. Default ``None``: as many as the
            pool has, but no more than a quarter of the free memory; none where the device's memory is the same RAM.
        host_codec: ``raw``, ``lossless``, ``int8`` or ``int4``. Default ``raw``: a copy is all that it costs.
            ``lossless`` holds a fifth more, and makes sense on a CPU; of the others see ``disk_codec``.
        disk_cache_bytes: most bytes of blocks on disk, in ``home/blocks``, of all models together; from there finished
            turns of named sessions come back after they left the device, also in another process. Default 4 GiB: it can
            be filled within a day's work, and is small beside a model. 0 switches the disk tier off. Other models than
            the one that runs keep half of it at most.
        disk_codec: ``raw``, ``lossless``, ``int8`` or ``int4``. Default ``lossless``: a fifth less to read.
            The last two are LOSSY: what comes back is not what was computed, everything in such a runtime counts as
            approximate, and it shares no blocks with an exact one.
        restore_deadline_ms: the longest that a request waits for blocks from a lower tier, in milliseconds; then it
            computes them. Default 2000: what 2,000 tokens take to compute on two CPU cores.
        threads: threads for torch's operators. Default ``None``: torch's own choice, the physical cores.
        kernels: ``auto`` or ``generic``. Default ``auto``: compiled kernels where they can be built. ``generic`` is
            plain torch, the reference that the compiled ones are tested against.
        deterministic: batch-invariant mode: the same token ids give the same bits whatever else is served and whatever
            the cache did, so that a hit is bitwise equal to a recompute. Default false: it costs speed. CPU only.
        untested_models: take model types that nobody has tested, if they pass a self-test when opened. Default false.
        offline: never reach for the network. Default false: opening the default model for the first time fetches it.
        publish_stats: write counters to a file in ``home/run`` every two seconds that they change, for ``kvos stats``.
            Default true: it is a kilobyte, written by a thread of its own.

    Raises:
        InvalidConfigError: a value outside its range; the text names setting, value and range.
    """

    home: Path = field(default_factory=_default_home)
    block_size: int = 16
    dtype: DType | Literal["auto"] = "auto"
    device: str = "auto"
    cache_bytes: int | None = None
    segment_bytes: int = 256 << 20
    max_context_tokens: int | None = None
    prefill_chunk_tokens: int = 512
    prefill_beside_decodes_tokens: int = 64
    max_batch_tokens: int = 512
    max_running: int = 32
    compaction: bool = True
    high_watermark_percent: int = 85
    low_watermark_percent: int = 60
    min_residency_s: int = 30
    max_resident_sessions: int = 8
    eviction: Literal["expected-return", "lru"] = "expected-return"
    host_cache_bytes: int | None = None
    host_codec: CodecName = "raw"
    disk_cache_bytes: int = 4 << 30
    disk_codec: CodecName = "lossless"
    restore_deadline_ms: int = 2000
    threads: int | None = None
    kernels: Literal["auto", "generic"] = "auto"
    deterministic: bool = False
    offline: bool = False
    untested_models: bool = False
    publish_stats: bool = True

    def __post_init__(self) -> None:
        self._set("home", _folder(self.home))
        self._one_of("block_size", ALLOWED_BLOCK_SIZES)
        self._one_of("dtype", ("auto", *(member.value for member in DType)))
        self._set("dtype", self.dtype if self.dtype == "auto" else DType(self.dtype))
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):
            raise _out_of_range("device", self.device, "'auto', 'cpu', 'cuda' or 'cuda:N'")
        self._integer("segment_bytes", 4096, MOST_BYTES)
        self._integer("prefill_chunk_tokens", 1, 1 << 16)
        self._integer("prefill_beside_decodes_tokens", 1, 1 << 16)
        self._integer("max_batch_tokens", 1, 1 << 20)
        self._integer("max_running", 1, 4096)
        self._integer("high_watermark_percent", 1, 100)
        self._integer("low_watermark_percent", 0, self.high_watermark_percent)
        self._integer("min_residency_s", 0, 86400)
        self._integer("max_resident_sessions", 1, 1 << 20)
        self._one_of("host_codec", CODECS)
        self._integer("disk_cache_bytes", 0, MOST_BYTES)
        self._one_of("disk_codec", CODECS)
        self._one_of("eviction", ("expected-return", "lru"))
        self._integer("restore_deadline_ms", 0, 3_600_000)
        for name, lowest, highest in (
            ("cache_bytes", 4096, MOST_BYTES), ("host_cache_bytes", 0, MOST_BYTES),
            ("max_context_tokens", 1, MOST_TOKENS), ("threads", 1, MOST_THREADS),
        ):  # fmt: skip
            if getattr(self, name) is not None:
                self._integer(name, lowest, highest)
        self._one_of("kernels", ("auto", "generic"))
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise _out_of_range(name, getattr(self, name), "True or False")
        if self.max_batch_tokens < self.max_running:
            expected = f"at least max_running ({self.max_running}), so that each running sequence gets its token"
            raise _out_of_range("max_batch_tokens", self.max_batch_tokens, expected)

    @classmethod
    def from_env(cls, **overrides: Any) -> KvosConfig:
        """The settings given here, else those of the environment, else the defaults.

        Raises:
            InvalidConfigError: an unknown name in ``overrides``, or a value outside its range.
        """
        names = tuple(setting.name for setting in fields(cls))
        for name in overrides:
            if name not in names:
                raise InvalidConfigError(_unknown_setting(name, names))
        return cls(**{**_settings_from(os.environ, names), **overrides})

    @property
    def exactness(self) -> str:
        """``exact``, or which tiers may give back something else than was computed."""
        lossy = [f"{codec} {where}" for where, codec in self._codecs_in_use() if codec in LOSSY_CODECS]
        return f"approximate ({', '.join(lossy)})" if lossy else "exact"

    def _codecs_in_use(self) -> tuple[tuple[str, str], ...]:
        host = () if self.host_cache_bytes == 0 else (("in host memory", self.host_codec),)
        return (*host, *(() if self.disk_cache_bytes == 0 else (("on disk", self.disk_codec),)))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _one_of(self, name: str, allowed: tuple[object, ...]) -> None:
        value = getattr(self, name)
        try:
            choice = value if isinstance(value, str) else operator.index(value)
        except (TypeError, ValueError):
            choice = None
        if choice not in allowed or isinstance(value, bool):
            raise _out_of_range(name, value, "one of " + ", ".join(repr(choice) for choice in allowed))
        self._set(name, choice)

    def _integer(self, name: str, lowest: int, highest: int | None = None) -> None:
        value = getattr(self, name)
        expected = f"a whole number from {lowest}" + ("" if highest is None else f" to {highest}")
        if name.endswith("_bytes"):
            expected += " (in the environment also with a unit: 2GiB)"
        try:
            number = operator.index(value)
        except (TypeError, ValueError):
            raise _out_of_range(name, value, expected) from None
        if isinstance(value, bool) or number < lowest or (highest is not None and number > highest):
            raise _out_of_range(name, value, expected)
        self._set(name, number)


def subprocess_environment(**changes: str) -> dict[str, str]:
    """This process's environment for a child, with ``changes``; the environment itself stays as it is."""
    return {**os.environ, **changes}


def tenant_folder_name(tenant: str) -> str:
    """A folder's name that no other tenant gets: the bytes of the name in hex, or a digest of a long one."""
    name = tenant.encode(errors="surrogatepass")
    return name.hex() if 2 * len(name) <= LONGEST_HEX else "long-" + hashlib.sha256(name).hexdigest()


def _out_of_range(name: str, value: object, expected: str) -> InvalidConfigError:
    return InvalidConfigError(f"{name} is {shown(value)}; expected {expected}")


def _folder(home: object) -> Path:
    """Where a home is, absolute."""
    expected = "the path of a folder"
    if not isinstance(home, str | os.PathLike) or not str(home):
        raise _out_of_range("home", home, expected)
    try:
        path = Path(home).expanduser().absolute()
    except (RuntimeError, TypeError, ValueError) as error:
        raise _out_of_range("home", home, f"{expected} ({error})") from error
    if "\0" in str(path):
        raise _out_of_range("home", home, f"{expected}, without a zero byte")
    return path


def _unknown_setting(name: str, names: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"there is no setting {name!r}.{hint} The settings are: {', '.join(sorted(names))}"


def _settings_from(environment: Mapping[str, str], names: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for variable, text in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or not text.strip():
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if name in names:
            found[name] = _parse(name, text.strip())
        elif difflib.get_close_matches(name, names, n=1, cutoff=0.8):
            _logger.warning("ignored environment variable %s: %s", variable, _unknown_setting(name, names))
    return found


def _parse(name: str, text: str) -> Any:
    """The value that ``text`` stands for; what it can't read it returns, for the range check to name."""
    if name in ("dtype", "device", "disk_codec", "eviction", "host_codec", "kernels", "home"):
        return text
    if name in SWITCHES:
        words = {**dict.fromkeys(_WORDS_FOR_TRUE, True), **dict.fromkeys(_WORDS_FOR_FALSE, False)}
        return words.get(text.lower(), text)
    if text.lower() == "none":
        return None
    size = _SIZE.fullmatch(text)
    if size is None or (size[2] and not name.endswith("_bytes")):
        return text
    if len(size[1]) > LONGEST_NUMBER:
        return text
    return int(size[1]) * _UNITS[(size[2] or "").lower()]
