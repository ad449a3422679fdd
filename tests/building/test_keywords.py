"""Keyword arguments of the functions that build."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import precache


@pytest.mark.parametrize(
    "function",
    [precache.build, precache.plan, precache.submit, precache.ensure, precache.doctor],
)
def test_a_pipeline_is_refused_by_the_name_of_the_recipe(function: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"takes a recipe as recipe=, not as pipeline="):
        function("in", "out", pipeline=precache.Recipe.image())


@pytest.mark.parametrize(
    "function",
    [precache.plan, precache.submit, precache.ensure, precache.refresh, precache.submit_refresh],
)
def test_an_unknown_keyword_is_named(function: Callable[..., Any]) -> None:
    name = function.__name__
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword .* 'colour'$"):
        function("in", "out", colour="red")
