"""Flags of commands, made from signatures; and documents of `precache job`, made from calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import precache
from precache.cli.calls import arguments
from precache.cli.commands import COMMANDS
from precache.cli.main import main, parse
from precache.cli.signatures import flag_of, help_of, parameters
from precache_workers.jobs.job_package import pack
from precache_workers.planning.options import BuildOptions
from tests.support.building import build_here, contents, write_jpegs

VALUES: dict[str, Any] = {
    "address": "auto", "labels": "labels.csv", "classes": "train.store", "accept_unmatched": True,
    "all_splits": True, "follow_links": True, "label_level": 2, "label_kind": "name",
    "label_separator": "|", "no_label": ["NaN", "null"], "class_order": "number",
    "keep_order": True, "ignore_ctime": True, "shard_samples": 12, "on_error": "raise",
    "max_failures": 0, "accept_missing": True, "compact": True, "compare": True,
    "recompute": True, "retry_failed": False, "check_space": False, "verify": True, "cpus": 3,
    "cpus_per_task": 0.5, "memory_per_task": "2GB", "nice": 3, "progress": False,
    "node_resources": {"spare": "1.5", "quick": "2"}, "node_labels": {"tier": "x", "zone": "a=b"},
    "report": ["report.html", "report.json"], "max_sample_bytes": "2GB", "sample_timeout": 99.5,
    "source_kind": "parquet", "image_column": "photo", "label_column": "species",
    "key_column": "id", "sample_name": "last-dot", "storage_options": {"anon": True, "key": "x"},
}  # fmt: skip


def read(*flags: str) -> dict[str, Any]:
    """Keyword arguments of `build` by these flags."""
    given = arguments("build", parse(["build", "in", "out", *flags]))
    return {name: given[name] for name in given.keys() - {"source", "store", "recipe"}}


def flags_of(values: dict[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        match value:
            case True:
                yield flag_of(name)
            case False:
                yield from ["--no-" + flag_of(name)[2:]] * (name != "retry_failed")
            case dict():
                texts = {key: "true" if entry is True else entry for key, entry in value.items()}
                yield from (f"{flag_of(name)}={key}={text}" for key, text in texts.items())
            case list():
                yield from (f"{flag_of(name)}={entry}" for entry in value)
            case _:
                yield f"{flag_of(name)}={value}"


def test_every_option_has_a_flag_of_its_name() -> None:
    # Functions of a recipe that the command line names are the user's own.
    apart = {"run_functions", "storage_options_env"}
    assert VALUES.keys() == BuildOptions.model_fields.keys() - apart
    assert BuildOptions(**read(*flags_of(VALUES))) == BuildOptions(**VALUES)


def test_without_flags_the_defaults_hold_and_progress_is_shown() -> None:
    assert BuildOptions(**read()) == BuildOptions(progress=True)


@pytest.mark.parametrize("command", ["build", "plan", "submit"])
def test_a_value_that_is_not_allowed_is_refused_by_its_flag(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    address = "auto" if command != "submit" else "http://127.0.0.1:1"
    flags = ["--address", address, "--node-resources=spare=x"]
    assert main([command, "in", "out", *flags]) == 2
    assert capsys.readouterr().err == "precache: --node-resources spare is 'x'; give a number\n"


def test_a_storage_option_is_read_from_a_variable_of_the_environment() -> None:
    given = read("--storage-options", "anon=true", "--storage-options-env", "key=KEY")
    by_name = BuildOptions(storage_options={"anon": True}, storage_options_env={"key": "KEY"})
    assert BuildOptions(**given).storage_options == by_name.storage_options
    with pytest.raises(SystemExit):
        read("--storage-options-env", "key=a secret")


def test_a_storage_option_that_takes_text_is_not_parsed() -> None:
    options = ("secret=0123", "key=1e5", "account_key=true", 'token="1"', "anon=true", "timeout=3")
    flags = [flag for option in options for flag in ("--storage-options", option)]
    texts = {"secret": "0123", "key": "1e5", "account_key": "true", "token": "1"}
    assert read(*flags)["storage_options"] == {**texts, "anon": True, "timeout": 3}
    assert read("--storage-options", "token=null")["storage_options"] == {"token": None}
    token = read("--storage-options", 'token={"type": "service_account"}')
    assert token["storage_options"] == {"token": {"type": "service_account"}}


@pytest.mark.parametrize("name", [name for group in COMMANDS.values() for name in group])
def test_every_argument_of_every_command_is_described(name: str) -> None:
    for function, parameter in parameters(name):
        assert parameter.name == "storage_options" or help_of(function, parameter.name)


RECIPE = precache.Recipe.image(random_resized_crop=20, variants=2, codec="raw")


def test_a_document_builds_as_the_function_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, store, other = write_jpegs(tmp_path / "in", 3), tmp_path / "job", tmp_path / "here"
    options = BuildOptions(address="serial", shard_samples=4, keep_order=True)
    assert main(["job", pack(str(source), str(store), RECIPE, options).document]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 3
    build_here(source, other, RECIPE, {"shard_samples": 4, "keep_order": True})
    assert contents(store) == contents(other)


def test_an_option_of_another_release_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(pack("/in", "/out", RECIPE, BuildOptions(address="auto")).document)
    document["options"]["colour"] = "red"
    assert main(["job", json.dumps(document)]) == 2
    assert "there is no option 'colour'" in capsys.readouterr().err
