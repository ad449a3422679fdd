"""Base models of recipes, with readable errors, and canonical JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from precache.errors import RecipeError
from precache.messages import did_you_mean


class Declared(BaseModel):
    """Base of the models that users declare; invalid data raises a `RecipeError`."""

    OPEN: ClassVar[tuple[str, ...]] = ()
    """Parameters of which it counts that the user stated them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, /, *values: Any, **data: Any) -> None:
        if values:
            name, names = type(self).__name__, [n for n in type(self).model_fields if n != "op"]
            first = f", as {name}({names[0]}={values[0]!r})" if names else ""
            raise RecipeError(f"{name} takes parameters by name{first}")
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise_recipe_error(type(self), error)

    # Nested models are validated without a call of __init__, so that errors keep their place.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # pydantic's mark

    def states(self, parameter: str) -> bool:
        """Return True if the user gave a parameter, be it the default."""
        return parameter in self.model_fields_set

    @classmethod
    def declared_at(cls, place: Sequence[int | str]) -> type[BaseModel]:
        """Return the model of the parameters at a place in this model's data."""
        return cls


UNICODE_ADVICE = (
    "it has bytes that are not UTF-8, as names in stores are; give a link to it (ln -s), or rename "
    "it"
)

_ADVICE = {
    "bool_parsing": "give True or False",
    "bool_type": "give True or False",
    "byte_size": "give bytes, or a size such as '2GB'",
    "byte_size_unit": "give bytes, or a size such as '2GB'",
    "dict_type": "give a table of names and values",
    "finite_number": "give a finite number",
    "float_parsing": "give a number",
    "float_type": "give a number",
    "greater_than": "give a number above {gt:g}",
    "greater_than_equal": "give a {whole}number from {ge:g} up",
    "int_parsing": "give a whole number",
    "int_type": "give a whole number",
    "less_than_equal": "the most is {le}",
    "string_unicode": UNICODE_ADVICE,
    "literal_error": "choose {expected}",
    "model_attributes_type": 'give a table, such as {{ op = "decode" }}',
    "model_type": "give a table of names and values",
    "string_type": "give text",
    "tuple_type": "give a list",
}
"""Advice by the type of pydantic's error."""


def advice(problem: ErrorDetails) -> str:
    """Describe the values that are allowed in place of a wrong one."""
    text = _ADVICE.get(problem["type"])
    if text is None:
        return problem["msg"]
    context = problem.get("ctx", {})
    whole = "" if isinstance(context.get("ge"), float) else "whole "
    return text.format_map({**context, "whole": whole})


def _describe(problem: ErrorDetails, model: type[Declared]) -> str:
    where = ""
    for part in problem["loc"]:
        where += f"[{part}]" if isinstance(part, int) else f".{part}" if where else str(part)
    context, value = problem.get("ctx", {}), problem["input"]
    match problem["type"]:
        case "union_tag_invalid":
            kind, tag, tags = context["discriminator"], context["tag"], context["expected_tags"]
            near = did_you_mean(tag, re.findall(r"\w+", tags))
            what = f"unknown {kind.strip(chr(39))} '{tag}'{near}; choose one of {tags}"
        case "union_tag_not_found":
            what = f'{value!r} has no {context["discriminator"]}, such as op = "decode"'
        case "extra_forbidden":
            allowed = model.declared_at(problem["loc"]).model_fields
            names = [name for name in allowed if name not in ("op", "name")]
            near = did_you_mean(str(problem["loc"][-1]), names)
            what = f"unknown parameter{near}; allowed here: {', '.join(names) or 'no parameter'}"
        case "missing" | "too_short" if where == "fields":
            return 'there is no field; begin with [fields.image] and ops = [{ op = "decode" }]'
        case "missing":
            what = "required, and missing"
        case "value_error":
            what = str(context["error"])
        case _:
            return f"{where or 'it'} is {value!r}; {advice(problem)}"
    return f"{where}: {what}" if where else what


def raise_recipe_error(model: type[Declared], error: ValidationError) -> NoReturn:
    """Raise a `RecipeError` that names each wrong place, its value and the allowed values."""
    problems = (_describe(problem, model) for problem in error.errors(include_url=False))
    raise RecipeError("the recipe is invalid: " + "; ".join(problems)) from None


def canonical_json(value: Any) -> bytes:
    """Serialise to UTF-8 JSON with sorted keys and no spaces."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()
