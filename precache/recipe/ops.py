"""Models of the ops of a recipe: their parameters, validated."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    PositiveInt,
    PrivateAttr,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic import Field as Attribute

from precache.recipe.base import ExtensibleModel, canonical_json

OPS_REVISION = 1
"""Part of every fingerprint."""

DType = Literal[
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float64",
]
DTYPES: tuple[str, ...] = get_args(DType)


def _pair(value: Any) -> Any:
    return (value, value) if hasattr(value, "__index__") else value


def _ascending(value: tuple[float, float]) -> tuple[float, float]:
    if not 0 < value[0] <= value[1]:
        raise ValueError(f"{list(value)} is not an ascending pair of positive numbers")
    return value


def _explained(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Validate a size; an invalid one gets one message instead of one per allowed type."""
    try:
        return validate(value)
    except ValidationError:
        raise ValueError(
            f"{value!r} is neither a number of pixels from 1 up nor a pair of them, [height, width]"
        ) from None


Size = Annotated[PositiveInt | tuple[PositiveInt, PositiveInt], WrapValidator(_explained)]
HeightWidth = Annotated[
    tuple[PositiveInt, PositiveInt], BeforeValidator(_pair), WrapValidator(_explained)
]
Bounds = Annotated[tuple[float, float], AfterValidator(_ascending)]
Interpolation = Literal["bilinear", "bicubic", "nearest"]
Mode = Literal["RGB", "L", "RGBA", "P"]
CHANNELS: Mapping[Mode, int] = {"RGB": 3, "L": 1, "RGBA": 4, "P": 1}
"""Mode of `Decode` -> channels of its result."""


def _function_name(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Validate the name of a function; a wrong one is answered with the way to write it."""
    try:
        return validate(value)
    except ValidationError:
        if not isinstance(value, str):
            raise
    near, way = ":".join(value.rsplit(".", 1)), "such as 'myops:equalize'"
    with contextlib.suppress(ValidationError):
        if not re.search(r"\.[.:]|:py$", near):
            way = f"write {validate(near)!r}"
    raise ValueError(f"{value!r} is not package.module:function; {way}")


# pydantic's \w has more characters than Python's: recipes of stores have names with them.
FunctionName = Annotated[
    str, Attribute(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"), WrapValidator(_function_name)
]


class Operation(ExtensibleModel):
    """An op of a recipe.

    Attributes
    ----------
    code
        Identifier of the code that the op runs, set when a build is planned. It is not part of the
        recipe, and comparisons ignore it.
    """

    OPEN: ClassVar[tuple[str, ...]] = ()
    """Parameters of which it counts that the user stated them: a build is refused where another
    value would suit the samples as well."""

    _code: str = PrivateAttr("")

    def states(self, parameter: str) -> bool:
        """Return True if the user gave a parameter, be it the default."""
        return parameter in self.model_fields_set

    @property
    def code(self) -> str:
        return self._code

    def with_code(self, code: str) -> Self:
        """Return a copy with `code`."""
        copy = self.model_copy()
        copy._code = code
        return copy

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.model_dump() == other.model_dump()

    def __hash__(self) -> int:
        return hash(self.model_dump_json())


class Decode(Operation):
    """Encoded image file -> (H, W, C) uint8, EXIF orientation applied.

    An image that a torch dataset opened with Pillow is taken as it is, orientation included. The
    formats are JPEG, PNG, WebP, BMP, GIF and TIFF. An image of 32-bit integers or floats becomes a
    hole. Alpha is dropped unless `mode` is ``RGBA``: transparent pixels get the colours that are
    stored beneath.

    Parameters
    ----------
    mode
        Pillow's name of the colour mode: ``RGB`` (C = 3), ``L`` (grey, C = 1), ``RGBA``; or ``P``
        for masks: the indices of a palette image, or the values of a grey one of 8 bits, as they
        are (C = 1). A palette image in a field of mode ``L``, and any other image in one of mode
        ``P``, becomes a hole.
    bits
        Significant bits of images that are stored with 16, of which the highest 8 are kept: 12 for
        a camera of 12 bits. Larger values make a hole. By default 16, and a build is refused where
        the samples that it tries suggest fewer.
    max_pixels
        A larger image becomes a hole instead of filling the memory.
    scaled
        Let libjpeg decode at 1/2, 1/4 or 1/8 if the resize that follows still shrinks the result.
        Faster on large photographs; pixels differ by a few levels from a full decode.
    """

    ADDED = ("bits",)
    OPEN = ("mode", "bits")

    op: Literal["decode"] = "decode"
    mode: Mode = "RGB"
    bits: Annotated[int, Attribute(ge=8, le=16)] = 16
    max_pixels: PositiveInt = 178_956_970
    scaled: bool = False


class Resize(Operation):
    """Resize with antialiasing; an integer `size` is the shorter side, the other is rounded down.

    A pair is the exact (height, width). `interpolation` is ``bilinear``, ``bicubic``, or for masks
    ``nearest``: the pixel that Pillow takes, which contains the centre of the new one, without
    antialiasing.
    """

    OPEN = ("interpolation",)

    op: Literal["resize"] = "resize"
    size: Size
    interpolation: Interpolation = "bilinear"


class CenterCrop(Operation):
    """The middle (height, width) of an image; a smaller image becomes a hole."""

    op: Literal["center_crop"] = "center_crop"
    size: HeightWidth


class RandomResizedCrop(Operation):
    """A random area and aspect ratio of the image, resized to `size`.

    The crop is drawn as in torchvision, by a generator seeded by (recipe seed, key, variant).
    `interpolation` is as in `Resize`.
    """

    OPEN = ("interpolation",)

    op: Literal["random_resized_crop"] = "random_resized_crop"
    size: HeightWidth
    scale: Bounds = (0.08, 1.0)
    ratio: Bounds = (3 / 4, 4 / 3)
    interpolation: Interpolation = "bilinear"


class HorizontalFlip(Operation):
    """Mirror left and right with probability `p`, seeded by (recipe seed, key, variant)."""

    op: Literal["horizontal_flip"] = "horizontal_flip"
    p: Annotated[float, Attribute(ge=0, le=1)] = 0.5


class ToDType(Operation):
    """Convert to `dtype`; with `scale`, integers first become floats in [0, 1]."""

    op: Literal["to_dtype"] = "to_dtype"
    dtype: DType
    scale: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.scale and not self.dtype.startswith("float"):
            raise ValueError(f"scale maps to [0, 1] and needs a float dtype, not {self.dtype}")
        return self


class Function(Operation):
    """A function of the user's own, ``package.module:function``, called as ``f(array, **params)``.

    In a field that decodes, the array is (H, W, C), and so must be the result if it is an image. A
    class is instantiated with the parameters once per task, and the instance is called.

    Parameters
    ----------
    version
        Text to change whenever the function computes something else. By default a digest of the
        function's code and of all code that it reaches takes its place; comments do not count.
    dtype, shape
        Dtype and shape of the stored row, if the function changes them: (C, H, W) for images.
    random
        True if the function draws random numbers. It then gets a `numpy.random.Generator` as
        ``random=``, seeded by (recipe seed, key, variant).

    Attributes
    ----------
    store
        Path of the version whose recipe names the function; it then runs only if the user allows
        it. Empty if the user's own recipe names it. Not part of the recipe.
    """

    ADDED = ("random",)

    op: Literal["function"] = "function"
    function: FunctionName
    version: str | None = None
    params: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies a default
    dtype: DType | None = None
    shape: tuple[PositiveInt, ...] | None = None
    random: bool = False
    _store: str = PrivateAttr("")

    @property
    def store(self) -> str:
        return self._store

    @field_validator("params")
    @classmethod
    def _check(cls, params: dict[str, Any]) -> dict[str, Any]:
        try:
            canonical_json(params)
        except (TypeError, ValueError) as error:
            raise ValueError(f"params must be what JSON can hold: {error}") from None
        return params

    @model_validator(mode="after")
    def _check_random(self) -> Self:
        if self.random and "random" in self.params:
            raise ValueError("params has 'random', the generator's parameter; rename it")
        return self


def _by_reference(value: Any) -> Any:
    """Replace a callable by a `Function`, which workers import by module and name."""
    kind = value if isinstance(value, type) else type(value)
    if kind.__module__ == "precache.transforms":
        raise ValueError(
            f"precache.transforms.{kind.__name__} changes batches as they are loaded: give it to a "
            "Loader; the ops of a recipe are in precache itself, as precache.Resize(size=256)"
        )
    if isinstance(value, BaseModel | Mapping) or not callable(value):
        return value
    params: Mapping[str, Any] = {}
    if isinstance(value, type) and issubclass(value, BaseModel):
        raise ValueError(f"{value.__name__} is a class of ops; write {value.__name__}(…)")
    if isinstance(value, functools.partial):
        if value.args:
            raise ValueError(f"{value!r} has positional arguments; give them by name")
        params, value = value.keywords, value.func
    kind = value if hasattr(value, "__qualname__") else type(value)
    module = sys.modules.get(kind.__module__)
    names = [name for name, member in vars(module).items() if member is value] if module else []
    own = getattr(value, "__name__", "")
    if kind.__module__ == "__main__" or not names:
        where = "is in the script that runs" if names else "has no name in a module"
        raise ValueError(
            f"{value!r} {where}, and workers import ops by module and name, which lambdas, nested "
            "functions and scripts do not have; put it into a module of its own"
        )
    name = own if own in names else names[0]
    return {"op": "function", "function": f"{kind.__module__}:{name}", "params": {**params}}


_Op = Decode | Resize | CenterCrop | RandomResizedCrop | HorizontalFlip | ToDType | Function
Op = Annotated[Annotated[_Op, Attribute(discriminator="op")], BeforeValidator(_by_reference)]
OPS: dict[Any, type[BaseModel]] = {op.model_fields["op"].default: op for op in get_args(_Op)}
"""Class of each op, by its name."""


def is_random(op: Op) -> bool:
    """Return whether an op draws random numbers."""
    if isinstance(op, Function):
        return op.random
    return isinstance(op, RandomResizedCrop | HorizontalFlip)


def crop_corner(shape: tuple[int, int], size: tuple[int, int]) -> tuple[int, int]:
    """Return top and left of the middle of an image, rounded as torchvision does."""
    return round((shape[0] - size[0]) / 2), round((shape[1] - size[1]) / 2)
