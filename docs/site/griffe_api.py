"""Parameters on the page of the API: those that share an entry, and the fields of recipes."""

import dataclasses
import itertools
from contextlib import suppress
from typing import Any

import griffe

_STARRED = (griffe.ParameterKind.var_positional, griffe.ParameterKind.var_keyword)


class ApiPage(griffe.Extension):
    """Takes the type and default of each name from its annotation.

    Griffe gives all names of an entry, such as ``shuffle, seed``, those of the first one. The text
    of an entry goes to its last name, where the templates expect it.
    """

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change an object and its docstring, once its package is loaded."""
        if isinstance(obj, griffe.Class) and any(base.name == "Declared" for base in obj.mro()):
            _set_init(obj)
        for section in obj.docstring.parsed if obj.docstring else []:
            if isinstance(section, griffe.DocstringSectionAttributes):
                section.value = [
                    griffe.DocstringAttribute(
                        name, annotation=_annotation(obj, name), description=entry.description
                    )
                    for entry in section.value
                    for name in entry.name.split(", ")
                ]
            elif isinstance(section, griffe.DocstringSectionParameters):
                for entry in section.value:
                    parameter = obj.parameters[entry.name]
                    entry.annotation = parameter.annotation
                    entry.value = None if parameter.kind in _STARRED else parameter.default
            else:
                continue
            for one, following in itertools.pairwise(section.value):
                if one.description == following.description:
                    one.description = ""


def _annotation(obj: griffe.Object, name: str) -> str | griffe.Expr | None:
    with suppress(KeyError):  # an attribute that is set elsewhere
        return obj[name].annotation
    return None


def _set_init(model: griffe.Class) -> None:
    """Give a model of pydantic an `__init__` that takes its fields."""
    parameters = [
        griffe.Parameter(
            field.name,
            annotation=_plain(field.annotation),
            kind=griffe.ParameterKind.keyword_only,
            default=field.value,
        )
        for field in model.attributes.values()
        if field.is_public and field.annotation and "instance-attribute" in field.labels
        if str(field.annotation) != "ClassVar"  # which griffe takes for one without its type
    ]
    own = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
    init = griffe.Function("__init__", parameters=griffe.Parameters(own, *parameters))
    model.set_member("__init__", init)


def _plain(annotation: Any) -> Any:
    """Replace names of types, such as `Size`, by the types, without pydantic's validators."""
    match annotation:
        case griffe.ExprName():
            with suppress(KeyError):  # of another package
                named = annotation.parent.modules_collection[annotation.canonical_path]
                return _plain(named.value) if named.is_attribute else annotation
        case griffe.ExprSubscript(left=left, slice=inside):
            if left.canonical_path == "typing.Annotated":
                return _plain(inside.elements[0])
            return dataclasses.replace(annotation, slice=_plain(inside))
        case griffe.ExprTuple(elements=elements):
            return dataclasses.replace(annotation, elements=[_plain(e) for e in elements])
        case griffe.ExprBinOp(left=left, right=right):
            return dataclasses.replace(annotation, left=_plain(left), right=_plain(right))
    return annotation
