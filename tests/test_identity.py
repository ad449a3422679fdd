"""What decides the pixels of a recipe, and what stands for it in fingerprints."""

from __future__ import annotations

import pytest

from precache.errors import PipelineError
from precache.pipeline import Pipeline
from workers.identity import by_libraries, decides


def of(**field: object) -> Pipeline:
    return Pipeline.from_dict({"fields": {"x": field}})


# --- the rule of older releases -----------------------------------------------------------------


def test_older_releases_counted_libraries_where_they_decide_pixels() -> None:
    rule = by_libraries({})
    assert set(rule(Pipeline.image())) == {"simplejpeg", "pillow"}
    assert set(rule(Pipeline.image(resize=8))) == {"simplejpeg", "pillow", "torch"}
    assert rule(of(ops=[{"op": "to_dtype", "dtype": "int32"}])) == {}
    assert "+" not in rule(Pipeline.image(resize=8))["torch"]


# --- functions ----------------------------------------------------------------------------------


def test_a_declared_version_stands_for_the_code() -> None:
    def versions(**more: str) -> dict[str, str]:
        op = {"op": "function", "function": "tests.building:hold", **more}
        return decides(Pipeline.from_dict({"fields": {"x": {"ops": [op]}}}))

    assert versions(version="7") == {"tests.building:hold": "7"}
    assert len(versions()["tests.building:hold"]) == 32


def test_a_function_that_is_nowhere_is_named() -> None:
    op = {"op": "function", "function": "nowhere_at_all:f"}
    with pytest.raises(PipelineError, match="nowhere_at_all:f"):
        decides(Pipeline.from_dict({"fields": {"x": {"ops": [op]}}}))


def test_two_functions_of_one_name_may_have_two_versions() -> None:
    """A version dropped in favour of another would hide a change."""

    def pipeline(first: str, second: str) -> Pipeline:
        op = {"op": "function", "function": "tests.building:hold"}
        fields = {
            "x": {"ops": [{**op, "version": first}]},
            "y": {"ops": [{**op, "version": second}]},
        }
        return Pipeline.from_dict({"fields": fields})

    prints = {
        (a, b): pipeline(a, b).fingerprint(decides(pipeline(a, b)))
        for a, b in (("1", "1"), ("1", "2"), ("2", "1"))
    }
    assert len(set(prints.values())) == 3
