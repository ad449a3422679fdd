"""Summaries of versions."""

from __future__ import annotations

from pathlib import Path

import pytest

import precache
from precache.errors import StoreError
from tests.conftest import BuiltStore


def test_a_summary_is_of_the_version_that_was_built(image_store: BuiltStore) -> None:
    info = precache.info(image_store.path)
    assert (info.version, info.path) == (image_store.result.version, image_store.result.path)
    assert (info.rows, sorted(info.holes)) == (23, sorted(image_store.result.holes))
    assert info.recipe == image_store.recipe
    assert info.fields["image"].shape == (3, 112, 112)
    assert info.classes == ("cat", "dog", "eel")
    assert info.mean.keys() == info.std.keys() == {"image"}
    assert info.libraries
    assert info == precache.info(f"{image_store.path}@{info.version[:5]}")


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a store"):
        precache.info(tmp_path)
