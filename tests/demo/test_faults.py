"""Planted faults: the demo has to notice them, and its exit code has to say so."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from kvos.demo import Script
from kvos.demo.record import DemoRecord
from kvos.demo.run import play, run_demo
from kvos.demo.show import Show
from kvos.engine import PackedBatch, TransformersEngine
from kvos.runtime import archive
from kvos.sessions import SavedSession


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVOS_HOME", str(tmp_path / "home"))


def test_a_decode_step_at_a_wrong_position_fails_the_demo(
    toy_folder: Path, toy_script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = TransformersEngine.forward

    def shifted(self: TransformersEngine, batch: PackedBatch) -> torch.Tensor:
        decodes_only = batch.num_rows == batch.num_sequences
        return forward(self, replace(batch, positions=batch.positions + 1) if decodes_only else batch)

    monkeypatch.setattr(TransformersEngine, "forward", shifted)
    output = io.StringIO()
    code = run_demo(toy_folder, dtype="fp64", script=toy_script, console=Console(file=output, width=120))
    assert code == 1
    assert output.getvalue().splitlines()[-1].startswith("NOT every reuse equalled a recompute: ")


def test_restored_keys_that_are_slightly_wrong_fail_the_resumed_part_only(
    toy_folder: Path, toy_script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = archive.export_session

    def slightly_wrong(*arguments: Any) -> SavedSession:
        saved = export(*arguments)
        saved.keys[1][saved.manifest.num_computed // 2] += 0.01
        return saved

    monkeypatch.setattr("kvos.runtime.session.export_session", slightly_wrong)
    record = _play(toy_folder, toy_script)
    assert not record.ok
    assert [part.label for part in record.check.parts if not part.ok] == ["supervisor, resumed"]


def _play(folder: Path, script: Script) -> DemoRecord:
    return play(str(folder), "fp64", script, Show(Console(file=io.StringIO())))
