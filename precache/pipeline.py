"""The declared recipe of a cached dataset: fields, ops and their parameters, and its fingerprint.

A pipeline is plain data. It comes from Python, from a TOML file or from flags, and has one
canonical JSON, so that the same meaning has the same fingerprint wherever it was written down.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    NonNegativeInt,
    PositiveInt,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic import Field as Attribute

from precache.errors import PipelineError
from precache.variants import arrays_of

OPS_REVISION = 1
"""Raised when an op of ours computes other pixels than before."""

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


def _refuse(model: type[BaseModel], error: ValidationError) -> NoReturn:
    lines = [_describe(each) for each in error.errors()]
    for each in error.errors():
        if each["type"] == "extra_forbidden":
            names = [n for n in _owner(model, each["loc"]).model_fields if n not in ("op", "name")]
            lines.append(f"allowed here: {', '.join(names) or 'no parameter'}")
    raise PipelineError("the pipeline does not hold: " + "; ".join(lines)) from None


def _owner(model: type[BaseModel], loc: tuple[int | str, ...]) -> type[BaseModel]:
    if model is Pipeline and len(loc) > 2:
        model, loc = Field, loc[2:]
    if model is Field and len(loc) > 1:
        return OPS[loc[2]] if loc[0] == "ops" else CODECS[loc[1]]
    return model


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, /, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            _refuse(type(self), error)

    # Nested models are validated without a call of __init__, so that errors keep their place.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # pydantic's mark


class _Grown(_Model):
    """Parameters of `ADDED` are written only where they are not the default.

    So the canonical JSON, and with it the fingerprint, of a recipe that does without them stays.
    """

    ADDED: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _without_defaults(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = write(self)
        for name in self.ADDED:
            if getattr(self, name) == type(self).model_fields[name].default:
                written.pop(name, None)
        return written


def _pair(value: Any) -> Any:
    return (value, value) if isinstance(value, int) else value


def _ascending(value: tuple[float, float]) -> tuple[float, float]:
    if not 0 < value[0] <= value[1]:
        raise ValueError(f"{list(value)} is not an ascending pair of positive numbers")
    return value


HeightWidth = Annotated[tuple[PositiveInt, PositiveInt], BeforeValidator(_pair)]
Bounds = Annotated[tuple[float, float], AfterValidator(_ascending)]
Interpolation = Literal["bilinear", "bicubic"]
MOST_VARIANTS = 1024


class Decode(_Model):
    """Encoded image file -> (H, W, C) uint8, EXIF orientation applied.

    Parameters
    ----------
    mode
        Pillow's name of the colours wanted: ``RGB`` (C = 3), ``L`` (grey, C = 1) or ``RGBA``.
    max_pixels
        A larger image becomes a hole instead of filling the memory.
    scaled
        Let libjpeg decode at 1/2, 1/4 or 1/8 where the resize that follows still shrinks the
        result. Faster on large photographs; pixels differ by a few levels from a full decode.
    """

    op: Literal["decode"] = "decode"
    mode: Literal["RGB", "L", "RGBA"] = "RGB"
    max_pixels: PositiveInt = 178_956_970
    scaled: bool = False


class Resize(_Model):
    """Resize with antialiasing; an integer `size` is the shorter side, the other is rounded down.

    A pair is the exact (height, width).
    """

    op: Literal["resize"] = "resize"
    size: PositiveInt | tuple[PositiveInt, PositiveInt]
    interpolation: Interpolation = "bilinear"


class CenterCrop(_Model):
    """The middle (height, width) of an image; a smaller image becomes a hole."""

    op: Literal["center_crop"] = "center_crop"
    size: HeightWidth


class RandomResizedCrop(_Model):
    """A random area and aspect ratio of the image, resized to `size`.

    Drawn as torchvision draws it, from a generator seeded by (pipeline seed, key, variant).
    """

    op: Literal["random_resized_crop"] = "random_resized_crop"
    size: HeightWidth
    scale: Bounds = (0.08, 1.0)
    ratio: Bounds = (3 / 4, 4 / 3)
    interpolation: Interpolation = "bilinear"


class HorizontalFlip(_Model):
    """Mirror left and right with probability `p`, seeded by (pipeline seed, key, variant)."""

    op: Literal["horizontal_flip"] = "horizontal_flip"
    p: Annotated[float, Attribute(ge=0, le=1)] = 0.5


class ToDType(_Model):
    """Convert to `dtype`; with `scale`, integers first become floats in [0, 1]."""

    op: Literal["to_dtype"] = "to_dtype"
    dtype: DType
    scale: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.scale and not self.dtype.startswith("float"):
            raise ValueError(f"scale maps to [0, 1] and needs a float dtype, not {self.dtype}")
        return self


class Function(_Grown):
    """A function of the user's own, ``package.module:function``, called as ``f(array, **params)``.

    Parameters
    ----------
    version
        Changes whenever the function computes something else. Without it, a hash of the syntax
        tree of the function's module stands in, in which comments do not count.
    dtype, shape
        Of the stored row, where the function changes them: (C, H, W) for images, though it sees
        and returns (H, W, C).
    random
        It draws random numbers: it is given a `numpy.random.Generator` as ``random=``, seeded by
        (pipeline seed, key, variant).
    """

    ADDED = ("random",)

    op: Literal["function"] = "function"
    function: Annotated[str, Attribute(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
    version: str | None = None
    params: dict[str, Any] = {}
    dtype: DType | None = None
    shape: tuple[PositiveInt, ...] | None = None
    random: bool = False

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
            raise ValueError("params has 'random', by which the generator is given; rename it")
        return self


Op = Annotated[
    Decode | Resize | CenterCrop | RandomResizedCrop | HorizontalFlip | ToDType | Function,
    Attribute(discriminator="op"),
]
OPS: dict[Any, type[BaseModel]] = {
    "decode": Decode,
    "resize": Resize,
    "center_crop": CenterCrop,
    "random_resized_crop": RandomResizedCrop,
    "horizontal_flip": HorizontalFlip,
    "to_dtype": ToDType,
    "function": Function,
}


def is_random(op: Op) -> bool:
    """Whether an op draws random numbers."""
    if isinstance(op, Function):
        return op.random
    return isinstance(op, RandomResizedCrop | HorizontalFlip)


class RawCodec(_Model):
    """Plain bytes with a CRC32C each chunk: the fastest to read, the largest on disk."""

    name: Literal["raw"] = "raw"


class ZstdCodec(_Model):
    """zstd, byte-shuffled for dtypes of several bytes: read by any Zarr v3 software."""

    name: Literal["zstd"] = "zstd"
    level: Annotated[int, Attribute(ge=-7, le=22)] = 1


class ImageCodec(_Model):
    """Lossless for (C, H, W) uint8 images: colour and vertical differences, then zstd."""

    name: Literal["image"] = "image"


CODECS: dict[Any, type[BaseModel]] = {"raw": RawCodec, "zstd": ZstdCodec, "image": ImageCodec}


def _codec(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


Codec = Annotated[
    RawCodec | ZstdCodec | ImageCodec, Attribute(discriminator="name"), BeforeValidator(_codec)
]


class Field(_Grown):
    """One cached tensor of every sample: the ops that make it and the codec that stores it.

    Parameters
    ----------
    ops
        Applied in order. In a field that decodes, they see (H, W, C) arrays, and the result is
        stored as (C, H, W).
    codec
        ``image`` for decoded uint8 images, else ``zstd``, unless given.
    input
        Which part of the sample the ops start from, for sources whose samples are dicts or tuples;
        by default the part that has the field's name, else the first.
    variants
        Random realisations of each sample that are kept, each an array of its own: epoch e reads
        the one whose number is e modulo `variants`.
    first_variant
        Number of the first of them. `precache refresh` counts it up, and a build goes on where it
        is, unless this is given.
    """

    ADDED = ("variants", "first_variant")

    ops: tuple[Op, ...] = ()
    codec: Codec | None = None
    input: str | int | None = None
    variants: Annotated[int, Attribute(ge=1, le=MOST_VARIANTS)] = 1
    first_variant: NonNegativeInt = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        for position, op in enumerate(self.ops):
            if isinstance(op, Decode) and position:
                raise ValueError("decode must come first")
        self._check_crops()
        if (self.variants, self.first_variant) != (1, 0) and self.fixed_ops == len(self.ops):
            raise ValueError(
                f"variants is {self.variants}, and no op is random, so that all would be the same: "
                "add random_resized_crop, horizontal_flip or a function with random = true, or "
                "leave variants out"
            )
        if self.codec is None:
            image = self.decodes and self.dtype == "uint8" and len(self.shape or (0, 0, 0)) == 3
            object.__setattr__(self, "codec", ImageCodec() if image else ZstdCodec())
        if isinstance(self.codec, ImageCodec) and self.dtype not in (None, "uint8"):
            raise ValueError(f"codec 'image' stores uint8, not {self.dtype}; use zstd or raw")
        if isinstance(self.codec, ImageCodec) and len(self.shape or (0, 0, 0)) != 3:
            raise ValueError(f"codec 'image' stores (C, H, W) rows, not {self.shape}; use zstd")
        return self

    def _check_crops(self) -> None:
        size: tuple[int, int] | None = None
        for op in self.ops:
            if isinstance(op, Resize):
                size = op.size if isinstance(op.size, tuple) else (op.size, op.size)
            elif isinstance(op, RandomResizedCrop):
                size = op.size
            elif isinstance(op, CenterCrop):
                if size and (op.size[0] > size[0] or op.size[1] > size[1]):
                    raise ValueError(
                        f"the crop of {op.size[0]} x {op.size[1]} is larger than the "
                        f"{size[0]} x {size[1]} before it; resize to at least {max(op.size)}"
                    )
                size = op.size
            elif isinstance(op, Function):
                size = None

    @property
    def stored_as(self) -> RawCodec | ZstdCodec | ImageCodec:
        """`codec`, which validation has filled in."""
        assert self.codec is not None
        return self.codec

    @property
    def fixed_ops(self) -> int:
        """Ops before the first random one: what they make is the same for all variants."""
        places = (at for at, op in enumerate(self.ops) if is_random(op))
        return next(places, len(self.ops))

    @property
    def leaves_variants_open(self) -> bool:
        """Whether it has variants, and does not say which."""
        return self.variants > 1 and "first_variant" not in self.model_fields_set

    @property
    def decodes(self) -> bool:
        return bool(self.ops) and isinstance(self.ops[0], Decode)

    @property
    def dtype(self) -> str | None:
        """Of the stored rows, where the ops tell."""
        dtype = "uint8" if self.decodes else None
        for op in self.ops:
            if isinstance(op, ToDType | Function):
                dtype = op.dtype or dtype
        return dtype

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Of one stored row, where the ops tell without a sample."""
        shape: tuple[int, ...] | None = None
        channels = {"RGB": 3, "L": 1, "RGBA": 4}
        for op in self.ops:
            match op:
                case CenterCrop() | RandomResizedCrop() | Resize(size=(_, _)):
                    first = self.ops[0]
                    depth = channels[first.mode] if isinstance(first, Decode) else None
                    if shape is not None and len(shape) == 3:
                        depth = shape[0]
                    # mypy takes the star of a pair for a tuple of any length.
                    shape = (depth, *op.size) if depth else None  # type: ignore[misc]
                case Resize():
                    shape = None
                case Function():
                    shape = op.shape or None
        return shape


class Pipeline(_Model):
    """The whole recipe: named fields, and the seed of their random ops.

    Examples
    --------
    >>> Pipeline.image(resize=256, crop=224).fields["image"].shape
    (3, 224, 224)
    """

    fields: Annotated[dict[str, Field], Attribute(min_length=1)]
    seed: int = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in self.fields:
            if name in RESERVED or name.startswith("_") or not name.isidentifier():
                raise ValueError(
                    f"a field cannot be called '{name}': use a plain identifier without a leading "
                    "underscore, other than " + ", ".join(sorted(RESERVED))
                )
        return self

    @classmethod
    def image(
        cls,
        *,
        resize: int | tuple[int, int] | None = None,
        crop: int | tuple[int, int] | None = None,
        random_resized_crop: int | tuple[int, int] | None = None,
        flip: bool = False,
        interpolation: Interpolation = "bilinear",
        mode: Literal["RGB", "L", "RGBA"] = "RGB",
        codec: str | None = None,
        seed: int = 0,
        variants: int = 1,
    ) -> Pipeline:
        """One field `image`: decode, then where given resize, crops and flip, in this order.

        Parameters
        ----------
        random_resized_crop, flip
            The random ops of these names, with their defaults.
        variants
            Random realisations of each sample that are kept; see `Field`.
        """
        ops: list[dict[str, Any]] = [{"op": "decode", "mode": mode}]
        if resize is not None:
            ops.append({"op": "resize", "size": resize, "interpolation": interpolation})
        if crop is not None:
            ops.append({"op": "center_crop", "size": crop})
        if random_resized_crop is not None:
            boxed = {"size": random_resized_crop, "interpolation": interpolation}
            ops.append({"op": "random_resized_crop", **boxed})
        if flip:
            ops.append({"op": "horizontal_flip"})
        image = {"ops": ops, "codec": codec, "variants": variants}
        return cls.from_dict({"fields": {"image": image}, "seed": seed})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Pipeline:
        """From plain data, as a TOML file or a version's metadata holds it.

        Raises
        ------
        PipelineError
            Naming the place, the value and what is allowed there.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            _refuse(cls, error)

    @classmethod
    def from_toml(cls, path: str | Path) -> Pipeline:
        """From a TOML file; see README for its form."""
        try:
            data = tomllib.loads(Path(path).read_text("utf-8"))
        except OSError as error:
            raise PipelineError(f"cannot read the pipeline {path}: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise PipelineError(f"{path} is not TOML: {error}") from None
        return cls.from_dict(data)

    def to_dict(self) -> dict[str, Any]:
        """Plain data with every default spelled out."""
        return self.model_dump(mode="json")

    def by_array(self) -> Pipeline:
        """The same with a field for each stored array: ``image.4`` is variant 4 of `image`."""
        fields = {
            array: each.model_copy(update={"variants": 1, "first_variant": number})
            for name, each in self.fields.items()
            for array, number in arrays_of(name, each).items()
        }
        return self.model_copy(update={"fields": fields})

    def with_fresh_variants(self) -> Pipeline:
        """The same with the oldest variant dropped and a new one made.

        Raises
        ------
        PipelineError
            No field has variants.
        """
        several = {name: each for name, each in self.fields.items() if each.variants > 1}
        if not several:
            raise PipelineError(
                "no field has variants; build with --variants 4, or variants = 4 in a field with "
                "random ops"
            )
        fresh = {
            name: each.model_copy(update={"first_variant": each.first_variant + 1})
            for name, each in several.items()
        }
        return self.model_copy(update={"fields": {**self.fields, **fresh}})

    def fingerprint(self, versions: Mapping[str, str]) -> str:
        """SHA-256 (hex) of the recipe.

        Parameters
        ----------
        versions
            Of the libraries that decide pixels, and of the custom functions, by name.
        """
        recipe = {"pipeline": self.to_dict(), "ops": OPS_REVISION, "versions": dict(versions)}
        return hashlib.sha256(canonical_json(recipe)).hexdigest()


RESERVED = frozenset({"label", "row", "key", "valid", "shards", "rows", "holes"})


def canonical_json(value: Any) -> bytes:
    """UTF-8 JSON with sorted keys and no spaces."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def op_texts(field: Field) -> list[str]:
    """A field's ops as calls, such as ``resize(size=256)``; defaults are left out."""
    texts = []
    for op in field.ops:
        given = op.model_dump(exclude_defaults=True, exclude={"op"})
        inside = ", ".join(f"{name}={value}" for name, value in given.items())
        texts.append(f"{op.op}({inside})" if inside else op.op)
    return texts
