"""A bar where somebody watches, one line per phase where nobody does; always on stderr."""

from __future__ import annotations

import pytest

from kvos.models.progress import BarProgress


def test_without_a_terminal_each_phase_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    progress = BarProgress()
    progress.begin("Downloading", 100)
    progress.update(50)
    progress.begin("Converting", None)
    progress.end()
    progress.end()
    captured = capsys.readouterr()
    assert captured.err.split() == ["Downloading", "Converting"]
    assert captured.out == ""


def test_without_a_terminal_a_long_phase_says_now_and_then_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("kvos.models.progress.time.monotonic", lambda: now[0])
    progress = BarProgress()
    progress.begin("verifying", 200)
    for done in (10, 20, 30, 40, 50):
        now[0] += 6.0  # every second one is more than ten seconds after the last line
        progress.update(done)
    progress.end()
    assert capsys.readouterr().err.splitlines() == ["verifying", "verifying: 10 %", "verifying: 20 %"]


def test_on_a_terminal_the_bar_moves(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes this for a terminal
    progress = BarProgress()
    progress.begin("Downloading", 100)
    progress.update(50)
    progress.end()
    text = capsys.readouterr().err
    assert "Downloading" in text
    assert "50%" in text
