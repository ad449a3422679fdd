"""A source that several files of tests build from."""

from pathlib import Path

import pytest

from tests.support.building import write, write_jpegs


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Forty photographs, the last broken."""
    write(tmp_path / "in/dog/0039.jpg", b"no photo")
    return write_jpegs(tmp_path / "in", 39, classes=("cat", "dog"))
