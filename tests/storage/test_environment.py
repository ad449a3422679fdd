"""Storage options that name variables of the environment."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from precache.storage.environment import with_environment
from precache.storage.open import open_folder
from tests.support.building import write_jpegs
from tests.support.command_line import Run
from tests.support.servers import S3Server

BY_NAME = {"key": "PHOTOS_KEY", "secret": "PHOTOS_SECRET"}


def split(s3: S3Server) -> tuple[dict[str, Any], dict[str, str]]:
    """Options of a server without secrets, and the variables that hold these."""
    options = s3.options()
    return options, {variable: options.pop(key) for key, variable in BY_NAME.items()}


def test_the_environment_is_read_where_the_storage_is_opened(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, variables = split(s3)
    folder = open_folder("s3://bucket/by-name", with_environment(plain, BY_NAME))
    sent = pickle.dumps(folder)
    for name, value in variables.items():
        assert value.encode() not in sent
        monkeypatch.setenv(name, value)
    folder.put("a", [b"1"])
    assert pickle.loads(sent).read("a") == b"1"
    digits = {**plain, "key": 12345678, "secret": 87654321}
    assert open_folder("s3://bucket/by-name", digits).read("a") == b"1"


def test_commands_take_variables_of_the_environment(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    source, store = write_jpegs(tmp_path / "in", 3), "s3://bucket/commands"
    plain, variables = split(s3)
    flags = [f"--storage-options=endpoint_url={plain['endpoint_url']}"]
    flags += ['--storage-options=client_kwargs={"region_name": "us-east-1"}']
    flags += [f"--storage-options-env={key}={variable}" for key, variable in BY_NAME.items()]
    with monkeypatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        for line in (["build", source, store, "--address", "serial"], ["info", store]):
            assert run(*line, *flags).status == 0, line
    for line in (["info", store], ["build", source, store]):
        monkeypatch.setenv("PHOTOS_KEY", "") if "info" in line else monkeypatch.delenv("PHOTOS_KEY")
        ran = run(*line, *flags)
        assert ran.status == 2
        assert "the environment variable PHOTOS_KEY of the storage option key is not" in ran.err
