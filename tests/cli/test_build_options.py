"""Flags of builds, made from the models of the options."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

import precache
from precache.cli.build_options import add_build_arguments, read_keywords
from precache_workers.planning.options import BuildOptions, flag_of

VALUES: dict[str, Any] = {
    "address": "auto",
    "labels": "labels.csv",
    "classes": "train.store",
    "accept_unmatched": True,
    "follow_links": True,
    "label_level": 2,
    "label_kind": "name",
    "label_separator": "|",
    "no_label": ["NaN", "null"],
    "class_order": "number",
    "keep_order": True,
    "ignore_ctime": True,
    "shard_samples": 12,
    "on_error": "raise",
    "max_failures": 0,
    "accept_missing": True,
    "compact": True,
    "compare": True,
    "recompute": True,
    "retry_failed": False,
    "check_space": False,
    "verify": True,
    "cpus": 3,
    "cpus_per_task": 0.5,
    "memory_per_task": "2GB",
    "node_resources": {"spare": "1.5", "quick": "2"},
    "node_labels": {"tier": "spot", "zone": "a=b"},
    "nice": 3,
    "progress": False,
    "report": ["report.html", "report.json"],
    "max_sample_bytes": "2GB",
    "sample_timeout": 99.5,
    "source_kind": "parquet",
    "image_column": "photo",
    "label_column": "species",
    "key_column": "id",
    "sample_name": "last-dot",
    "storage_options": {"anon": True, "key": "x"},
}


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_build_arguments(parser)
    return parser.parse_args(["in", "out", *flags])


def flags_of(values: dict[str, Any]) -> list[str]:
    flags = []
    for name, value in values.items():
        match value:
            case True:
                flags += [flag_of(name)]
            case False:
                flags += [flag_of(name)] * (name in ("check_space", "progress"))
            case dict():
                texts = {key: "true" if entry is True else entry for key, entry in value.items()}
                flags += [f"{flag_of(name)}={key}={text}" for key, text in texts.items()]
            case list():
                flags += [f"{flag_of(name)}={entry}" for entry in value]
            case _:
                flags += [f"{flag_of(name)}={value}"]
    return flags


def test_every_option_has_a_flag() -> None:
    # Functions of a recipe that the command line names are the user's own.
    apart = {"run_functions", "storage_options_env"}
    assert VALUES.keys() == BuildOptions.model_fields.keys() - apart
    read = read_keywords(parsed(*flags_of(VALUES)))
    assert BuildOptions(**read) == BuildOptions(**VALUES)


def test_without_flags_the_defaults_hold_and_progress_is_shown() -> None:
    assert BuildOptions(**read_keywords(parsed())) == BuildOptions(progress=True)


def test_a_value_that_is_not_allowed_is_refused_by_its_flag() -> None:
    with pytest.raises(precache.UsageError, match=r"^--resource spare is 'x'; give a number$"):
        read_keywords(parsed("--address=auto", "--resource=spare=x"))


def test_a_storage_option_is_read_from_a_variable_of_the_environment() -> None:
    read = read_keywords(parsed("--storage-option", "anon=true", "--storage-option-env", "key=KEY"))
    by_name = BuildOptions(storage_options={"anon": True}, storage_options_env={"key": "KEY"})
    assert BuildOptions(**read).storage_options == by_name.storage_options
    with pytest.raises(SystemExit):
        parsed("--storage-option-env", "key=a secret")


def test_a_storage_option_that_takes_text_is_not_parsed() -> None:
    options = ("secret=0123", "key=1e5", "account_key=true", 'token="1"', "anon=true", "timeout=3")
    flags = [flag for option in options for flag in ("--storage-option", option)]
    read = BuildOptions(**read_keywords(parsed(*flags))).storage_options
    texts = {"secret": "0123", "key": "1e5", "account_key": "true", "token": "1"}
    assert read == {**texts, "anon": True, "timeout": 3}
    unset = parsed("--storage-option", "token=null")
    assert dict(read_keywords(unset)["storage_options"]) == {"token": None}
    token = parsed("--storage-option", 'token={"type": "service_account"}')
    assert dict(read_keywords(token)["storage_options"]) == {"token": {"type": "service_account"}}
