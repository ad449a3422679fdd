"""The progress lines of a build without a terminal."""

from __future__ import annotations

import pytest

from precache_workers.driver.progress import BuildProgress


def test_a_first_shard_without_samples_has_no_rate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of its rows may be removed ones."""
    monkeypatch.setattr("precache_workers.driver.progress.LINE_EVERY", 0)
    with BuildProgress(True) as progress:
        progress.begin(0, 8)
        progress.advance(0, 0)
        progress.advance(8, 0)
    assert "0 of 8 samples\n8 of 8 samples, " in capsys.readouterr().err
