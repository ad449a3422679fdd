"""Options of a build: what is accepted, and how a refusal names the option."""

import inspect
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import precache
from precache.errors import UsageError
from precache_workers.planning.options import BuildOptions, read_options

JOINED = {"address": "auto"}
REUSES = "reuses all samples but those that failed"
AUTO = "give auto, host:6379 or ray://host:10001"


def test_the_signature_of_build_has_the_options_and_their_defaults() -> None:
    parameters = inspect.signature(precache.build).parameters
    defaults = {n: p.default for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert defaults.keys() == BuildOptions.model_fields.keys()
    assert BuildOptions(**defaults) == BuildOptions()


def test_values_become_plain() -> None:
    options = read_options(
        BuildOptions,
        {
            "shard_samples": np.int64(3),
            "labels": Path("labels.csv"),
            "report": Path("report.html"),
            "max_sample_bytes": "2GB",
            "node_resources": [("spare", "1.5")],
            "node_labels": None,
            "address": "auto",
        },
    )
    assert type(options.shard_samples) is int
    assert (options.labels, options.report) == ("labels.csv", ("report.html",))
    assert options.max_sample_bytes == 2_000_000_000
    assert (options.node_resources, options.node_labels) == ({"spare": 1.5}, {})
    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"shard_samples": 0}, "shard_samples is 0; give a whole number from 1 up"),
        ({"shard_samples": 1 << 30}, "shard_samples is 1073741824; the most is 16777216"),
        ({"cpus": True}, "cpus is True; give a whole number"),
        ({"max_failures": 1.5}, "max_failures is 1.5; give a whole number"),
        ({"accept_missing": "perhaps"}, "accept_missing is 'perhaps'; give True or False"),
        ({"check_space": "perhaps"}, "check_space is 'perhaps'; give True or False"),
        ({"labels": 5}, "labels is 5; give text"),
        ({"report": 5}, "report is 5; give a list"),
        ({"cpus_per_task": 0, **JOINED}, "cpus_per_task is 0; give a number above 0"),
        (
            {"memory_per_task": "-1GB", **JOINED},
            "memory_per_task is '-1GB'; give bytes, or a size such as '2GB'",
        ),
        ({"node_resources": {"x": 0}, **JOINED}, "node_resources x is 0; give a number above 0"),
        (
            {"node_labels": {"tier": "!a"}, **JOINED},
            "node_labels is {'tier': '!a'}; label tier=!a is not KEY=VALUE, such as tier=spot",
        ),
        ({"nice": 20, **JOINED}, "nice is 20; the most is 19"),
        ({"nice": 5}, f"nice is for a cluster that is joined, and address is 'local'; {AUTO}"),
        (
            {"retry_failed": True, "recompute": True},
            f"retry_failed {REUSES}, and recompute reuses none; drop one",
        ),
        ({"colour": 1}, "there is no option 'colour'"),
        ({"storage_options": "a"}, "storage_options is of another type; give values by name"),
    ],
)
def test_a_refusal_names_the_option_and_its_value(values: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_options(BuildOptions, values)
    assert str(caught.value) == text


def test_a_cluster_is_named_as_ray_does_and_nothing_else_is_an_address() -> None:
    for address in ("", "Local", "localhost", "http://head:6379", "ray:/head"):
        match = f"address is '{address}'; choose local, serial, auto"
        with pytest.raises(UsageError, match=match):
            read_options(BuildOptions, {"address": address})
    for address in ("auto", "127.0.0.1:6379", "[::1]:6379", "ray://head:10001"):
        options = read_options(BuildOptions, {"address": address, "cpus_per_task": 2})
        assert options.address == address
