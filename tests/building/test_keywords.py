"""Keyword arguments of the functions that build."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import precache


@pytest.mark.parametrize(
    "function",
    [precache.plan, precache.submit, precache.ensure, precache.refresh],
)
def test_an_unknown_keyword_is_named(function: Callable[..., Any]) -> None:
    name = function.__name__
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword .* 'colour'$"):
        function("in", "out", colour="red")
