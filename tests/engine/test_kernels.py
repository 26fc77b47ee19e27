"""The compiled kernels against a formula in float64, on any number of threads, and their kept machine code."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.driver import Driver, Work
from kvos.engine import PackedBatch, TransformersEngine
from kvos.engine.kernels import Kernels
from kvos.engine.kernels.fused_norm import FusedNorms
from kvos.engine.kernels.packed_linear import PackedLinears
from kvos.engine.kernels.threads import WorkerThreads
from kvos.engine.plan import context_slots
from kvos.errors import MissingDependencyError
from kvos.storage import BlockPool, KVLayout
from kvos.testing import toy_model

pytest.importorskip("numba")

from kvos.engine.kernels import object_code
from kvos.engine.kernels.decode_step import NumbaDecode, NumbaDecodeStep

KV_HEADS, HEADS, DIM = 2, 4, 16  # those of the toy model: compiled once for all tests
LAYOUT = KVLayout.uniform(num_layers=2, kv_heads=KV_HEADS, head_dim=DIM)


@pytest.fixture(scope="module")
def kernel() -> NumbaDecode:
    return NumbaDecode(LAYOUT, HEADS, WorkerThreads.find(), None)


class Scene:
    """Random keys and values behind shuffled tables in several segments; one new row per sequence."""

    def __init__(self, lengths: list[int], seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        rng = np.random.default_rng(seed)
        width = -(-max(lengths) // 16)
        self.pool = BlockPool(LAYOUT, max_blocks=width * len(lengths), blocks_per_segment=5)
        while self.pool.grow():
            for tensor in (*self.pool.segments[-1].keys, *self.pool.segments[-1].values):
                tensor.fill_(float("nan"))
        tables = rng.permutation(self.pool.num_blocks).reshape(len(lengths), width)
        rows = np.arange(len(lengths))
        last = np.array(lengths) - 1
        for table, length in zip(tables, lengths, strict=True):
            slots = context_slots(table, length, 16)[:-1]
            for layer in range(2):
                self.pool.write(layer, slots, self.random(len(slots), KV_HEADS), self.random(len(slots), KV_HEADS))
        self.batch = PackedBatch(
            token_ids=np.zeros(len(lengths), dtype=np.int32),
            positions=last,
            write_rows=rows,
            write_slots=tables[rows, last // 16] * 16 + last % 16,
            query_starts=np.arange(len(lengths) + 1),
            context_lengths=np.array(lengths),
            block_tables=tables,
            logit_rows=rows,
        )
        # As in the model: heads before rows in memory, seen the other way round.
        self.queries = self.random(HEADS, len(lengths)).transpose(0, 1)
        self.keys, self.values = (self.random(KV_HEADS, len(lengths)).transpose(0, 1) for _ in range(2))

    def random(self, rows: int, heads: int) -> torch.Tensor:
        return torch.randn((rows, heads, DIM), generator=self.generator)

    def run(self, kernel: NumbaDecode, chosen: list[int] | None = None, scale: float = 0.25) -> torch.Tensor:
        sequences = np.arange(self.batch.num_sequences) if chosen is None else np.array(chosen)
        out = torch.zeros((self.batch.num_rows, HEADS, DIM))
        step = NumbaDecodeStep(kernel, self.batch, self.pool, sequences)
        step.attend(1, self.queries, self.keys, self.values, scale, out)
        return out

    def expected(self, scale: float = 0.25) -> torch.Tensor:
        """The definition of attention, in float64."""
        out = []
        for row, (table, length) in enumerate(zip(self.batch.block_tables, self.batch.context_lengths, strict=True)):
            keys, values = (kv.double() for kv in self.pool.read(1, context_slots(table, int(length), 16)))
            query = self.queries[row].double().unflatten(0, (KV_HEADS, -1))
            weights = (torch.einsum("hgd,shd->hgs", query, keys) * scale).softmax(-1)
            out.append(torch.einsum("hgs,shd->hgd", weights, values).flatten(0, 1))
        return torch.stack(out)


@pytest.mark.parametrize("lengths", [[1], [2, 63, 64, 65], [700, 1, 128, 129, 17]])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_decode_kernel_is_attention(kernel: NumbaDecode, lengths: list[int], threads: int) -> None:
    torch.set_num_threads(threads)
    scene = Scene(lengths)
    out = scene.run(kernel)
    assert (out - scene.expected()).abs().max() < 1e-6


def test_the_decode_kernel_runs_without_pytorchs_threads() -> None:
    scene = Scene([200, 3])
    assert (scene.run(NumbaDecode(LAYOUT, HEADS, None, None)) - scene.expected()).abs().max() < 1e-6


def test_the_decode_kernel_stores_keys_and_values(kernel: NumbaDecode) -> None:
    scene = Scene([20, 33])
    scene.run(kernel)
    keys, values = scene.pool.read(1, scene.batch.write_slots)
    assert torch.equal(keys, scene.keys)
    assert torch.equal(values, scene.values)
    assert scene.pool.read(0, scene.batch.write_slots)[0].isnan().all()


def test_large_scores_do_not_overflow_and_small_ones_vanish(kernel: NumbaDecode) -> None:
    scene = Scene([100])
    out = scene.run(kernel, scale=500.0)
    assert torch.isfinite(out).all()
    assert (out - scene.expected(scale=500.0)).abs().max() < 1e-3


def test_a_sequence_gets_the_same_bits_alone_in_company_and_with_any_number_of_threads(kernel: NumbaDecode) -> None:
    scene = Scene([300, 90, 511, 64])
    torch.set_num_threads(1)
    together = scene.run(kernel)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(scene.run(kernel), together)
        for row in range(4):
            assert torch.equal(scene.run(kernel, [row])[row], together[row])


def test_rows_of_chunks_are_left_alone(kernel: NumbaDecode) -> None:
    scene = Scene([40, 50])
    assert not scene.run(kernel, [1])[0].any()


def test_elements_of_a_head_must_be_neighbours(kernel: NumbaDecode) -> None:
    scene = Scene([4])
    scene.queries = scene.queries.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="side by side"):
        scene.run(kernel)


def test_compiled_and_generic_engines_agree() -> None:
    logits = []
    for kernels in (Kernels("numba", "packed"), Kernels("generic", "plain", "plain")):
        driver = Driver(TransformersEngine(toy_model(), kernels=kernels), blocks_per_segment=9)
        histories = [driver.history(tokens) for tokens in (100, 150, 33)]
        driver.step(*(Work(history, len(history.ids) - 3) for history in histories))
        logits.append(torch.stack([torch.cat(driver.step(*(Work(h, 1) for h in histories))) for _ in range(3)]))
    assert torch.allclose(*logits, atol=1e-4)


def test_packed_linears_compute_what_plain_ones_do_and_are_undone() -> None:
    model = toy_model(attention_bias=True, mlp_bias=True)
    layer = model.model.layers[0].mlp.up_proj
    torch.nn.init.normal_(layer.bias)
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        plain = layer(x)
        packed = PackedLinears(model)
        assert torch.allclose(layer(x), plain, atol=1e-5)
        assert layer(x[:, :0]).shape == (2, 0, 128)
        packed.undo()
        assert torch.equal(layer(x), plain)


def test_a_linear_that_has_a_forward_of_its_own_is_left_alone() -> None:
    model = toy_model()
    model.lm_head.forward = lambda x: x * 2
    packed = PackedLinears(model)
    assert torch.equal(model.lm_head(torch.ones(3)), torch.full((3,), 2.0))
    packed.undo()
    assert "forward" in vars(model.lm_head)


def test_fused_norms_compute_what_plain_ones_do_and_are_undone() -> None:
    model = toy_model()
    norm = model.model.norm
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(1, 7, 64)
    with torch.no_grad():
        plain = norm(x)
        fused = FusedNorms(model)
        assert torch.allclose(norm(x), plain, rtol=1e-6, atol=1e-6)
        fused.undo()
        assert torch.equal(norm(x), plain)


def test_a_numba_that_cannot_compile_leaves_the_generic_path(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: int) -> None:
        raise AttributeError("no such thing in this version")

    object_code.load_decode.cache_clear()
    monkeypatch.setattr("kvos.engine.kernels.numba_decode.compile_decode", fail)
    engine = TransformersEngine(toy_model(), kernels=Kernels(linear="plain", norm="plain"))
    assert engine.kernels == Kernels("generic", "plain", "plain")
    assert "no such thing" in caplog.text
    with pytest.raises(MissingDependencyError, match="could not compile"):
        TransformersEngine(toy_model(), kernels=Kernels("numba", "plain", "plain"))


# -- kept machine code --------------------------------------------------------------------------------------------

GEOMETRY = object_code.Geometry(1, 1, 8, 8)


def kept_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_kept_code_is_used_by_another_process_without_numba(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    object_code.load_decode(GEOMETRY, folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    script = (
        "import sys; sys.modules['numba'] = None\n"
        "from pathlib import Path; from kvos.engine.kernels.object_code import Geometry, load_decode\n"
        f"assert load_decode(Geometry(1, 1, 8, 8), Path({str(folder)!r})).address\n"
    )
    subprocess.run(
        [sys.executable, "-c", script], check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )


@pytest.mark.parametrize("damage", ["flipped", "other name", "short", "empty", "writable by others", "a pipe"])
def test_kept_code_that_is_damaged_or_not_ours_is_compiled_anew(tmp_path: Path, damage: str) -> None:
    object_code.load_decode.cache_clear()
    object_code.load_decode(GEOMETRY, tmp_path)
    path = kept_file(tmp_path)
    good = path.read_bytes()
    match damage:
        case "flipped":
            path.write_bytes(good[:-100] + bytes([good[-100] ^ 1]) + good[-99:])
        case "other name":  # of the function: an address that would be called
            path.write_bytes(good.replace(b'"symbol": "', b'"symbol": "x', 1))
        case "a pipe":
            path.unlink()
            os.mkfifo(path)
        case "short":
            path.write_bytes(good[:-1])
        case "empty":
            path.write_bytes(b"")
        case "writable by others":
            path.chmod(0o666)
    assert object_code._read(path) is None
    path.unlink()
    path.touch(0o600)
    path.write_bytes(good)
    assert object_code._read(path) is not None


def test_code_for_another_geometry_is_another_file(tmp_path: Path) -> None:
    assert object_code._recipe(GEOMETRY) != object_code._recipe(replace(GEOMETRY, k_dim=16))


def test_a_folder_that_cannot_be_written_costs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    object_code._write(tmp_path / "file" / "decode.o", "symbol", b"code")
    assert object_code._read(tmp_path / "file" / "decode.o") is None


def test_code_without_the_function_is_never_called(tmp_path: Path) -> None:
    object_code.load_decode.cache_clear()
    object_code.load_decode(GEOMETRY, tmp_path)
    kept = object_code._read(kept_file(tmp_path))
    assert kept is not None
    with pytest.raises(MissingDependencyError, match="no function 'elsewhere'"):
        object_code._load("elsewhere", kept[1])
