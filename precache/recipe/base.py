"""Base models of what users declare: readable errors, and canonical JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from pydantic import (
    BaseModel,
    ConfigDict,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from precache.errors import RecipeError


class Declared(BaseModel):
    """Base of what a user declares; invalid data raises a `RecipeError`."""

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

    @classmethod
    def declared_at(cls, place: Sequence[int | str]) -> type[BaseModel]:
        """Return the model of the parameters at a place in this model's data."""
        return cls


class ExtensibleModel(Declared):
    """Base of models to which parameters were added later.

    Parameters in `ADDED` are serialised only if they differ from the default. So the canonical
    JSON, and the fingerprint, of recipes that do not use them stays the same.
    """

    ADDED: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _without_defaults(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = write(self)
        for name in self.ADDED:
            if getattr(self, name) == type(self).model_fields[name].default:
                written.pop(name, None)
        return written


def _describe(error: Mapping[str, Any]) -> str:
    where = ""
    for part in error["loc"]:
        where += f"[{part}]" if isinstance(part, int) else f".{part}" if where else str(part)
    context = error.get("ctx", {})
    match error["type"]:
        case "union_tag_invalid":
            tags = context["expected_tags"]
            what = f"unknown {context['discriminator']} '{context['tag']}'; choose one of {tags}"
        case "union_tag_not_found":
            what = f"{error['input']!r} names no {context['discriminator']}"
        case "extra_forbidden":
            what = "unknown parameter"
        case "value_error":
            what = str(context["error"])
        case _:
            what = f"{error['msg']} (got {error['input']!r})"
    return f"{where}: {what}" if where else what


def raise_recipe_error(model: type[Declared], error: ValidationError) -> NoReturn:
    """Raise a `RecipeError` that names the places, the values and what is allowed there."""
    lines = [_describe(fault) for fault in error.errors()]
    for fault in error.errors():
        if fault["type"] == "extra_forbidden":
            allowed = model.declared_at(fault["loc"]).model_fields
            names = [name for name in allowed if name not in ("op", "name")]
            lines.append(f"allowed here: {', '.join(names) or 'no parameter'}")
    raise RecipeError("the recipe is invalid: " + "; ".join(lines)) from None


def canonical_json(value: Any) -> bytes:
    """Serialise to UTF-8 JSON with sorted keys and no spaces."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()
