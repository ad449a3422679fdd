"""The declared recipe of a cached dataset: fields, their ops and codecs, and its fingerprint.

A recipe is plain data, from Python, a TOML file or flags. It has one canonical JSON, so that equal
recipes have the same fingerprint however they were written.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    NonNegativeInt,
    ValidationError,
    model_validator,
)
from pydantic import Field as Attribute

from precache.errors import RecipeError
from precache.recipe.base import Declared, ExtensibleModel, canonical_json, raise_recipe_error
from precache.recipe.ops import (
    CHANNELS,
    OPS,
    OPS_REVISION,
    CenterCrop,
    Decode,
    Function,
    Interpolation,
    Mode,
    Op,
    RandomResizedCrop,
    Resize,
    ToDType,
    is_random,
)
from precache.recipe.variants import arrays_of

MAX_VARIANTS = 1024


class RawCodec(Declared):
    """Plain bytes with a CRC32C per chunk: the fastest to read, the largest on disk."""

    name: Literal["raw"] = "raw"


class ZstdCodec(Declared):
    """zstd, byte-shuffled for dtypes of several bytes: read by any Zarr v3 software."""

    name: Literal["zstd"] = "zstd"
    level: Annotated[int, Attribute(ge=-7, le=22)] = 1


class ImageCodec(Declared):
    """Lossless for (C, H, W) uint8 images: colour and vertical differences, then zstd."""

    name: Literal["image"] = "image"


_Codec = RawCodec | ZstdCodec | ImageCodec
CODEC_CLASSES: dict[Any, type[BaseModel]] = {
    codec.model_fields["name"].default: codec for codec in get_args(_Codec)
}
"""Class of each codec, by its name."""


def _codec(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


Codec = Annotated[_Codec, Attribute(discriminator="name"), BeforeValidator(_codec)]


class Field(ExtensibleModel):
    """One cached tensor of every sample: the ops that make it and the codec that stores it.

    Parameters
    ----------
    ops
        Ops, in order. In a field that decodes, they see (H, W, C) arrays, and the result is stored
        as (C, H, W).
    codec
        Name, or a dict such as ``{"name": "zstd", "level": 3}``: ``image``, ``zstd`` or ``raw``. By
        default ``image`` for decoded uint8 images, else ``zstd``.
    input
        Part of the sample that the ops start from, for sources whose samples are dicts or tuples;
        by default the part with the field's name, else the first.
    variants
        Number of random realisations of each sample, each stored as an array of its own: epoch e
        reads the one whose number is e modulo `variants`. A build requires it of a field with
        random ops: with 1, all epochs read the same draw.
    first_variant
        Number of the first variant. By default that of the store's current version, which
        `precache refresh` increments.
    """

    ADDED = ("variants", "first_variant")

    ops: tuple[Op, ...] = ()
    codec: Codec | None = None
    input: str | int | None = None
    variants: Annotated[int, Attribute(ge=1, le=MAX_VARIANTS)] = 1
    first_variant: NonNegativeInt = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        for position, op in enumerate(self.ops):
            if isinstance(op, Decode) and position:
                raise ValueError("decode must come first")
        self._check_crops()
        self._check_indices()
        if (self.variants, self.first_variant) != (1, 0) and self.fixed_ops == len(self.ops):
            raise ValueError(
                f"variants is {self.variants}, but no op is random, so all would be the same: "
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

    @classmethod
    def declared_at(cls, place: Sequence[int | str]) -> type[BaseModel]:
        if len(place) > 1:
            return OPS[place[2]] if place[0] == "ops" else CODEC_CLASSES[place[1]]
        return cls

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

    def _check_indices(self) -> None:
        """Raise for ops that would blend the values of a mask."""
        first = self.ops[0] if self.ops else None
        if not isinstance(first, Decode):
            return
        resampling = [op for op in self.ops if isinstance(op, Resize | RandomResizedCrop)]
        for op in resampling:
            if first.mode == "P" and op.interpolation != "nearest":
                raise ValueError(
                    f"decode keeps indices (mode 'P'), and {op.op} would blend them to others by "
                    f'{op.interpolation}; give it interpolation = "nearest"'
                )
        if first.scaled and (
            first.mode == "P" or any(op.interpolation == "nearest" for op in resampling)
        ):
            raise ValueError(
                "decode has scaled = true, which blends pixels, and the field keeps values as they "
                "are; leave scaled out"
            )

    @property
    def frozen_draw(self) -> bool:
        """True if the field has random ops, and all epochs read the same draw."""
        return self.variants == 1 and self.fixed_ops < len(self.ops)

    @property
    def stored_as(self) -> RawCodec | ZstdCodec | ImageCodec:
        """`codec`, which validation has filled in."""
        assert self.codec is not None
        return self.codec

    @property
    def fixed_ops(self) -> int:
        """Number of ops before the first random one, whose result all variants share."""
        return next((n for n, op in enumerate(self.ops) if is_random(op)), len(self.ops))

    @property
    def leaves_variants_open(self) -> bool:
        """True if the field has variants, but no explicit number of the first."""
        return self.variants > 1 and "first_variant" not in self.model_fields_set

    @property
    def decodes(self) -> bool:
        return bool(self.ops) and isinstance(self.ops[0], Decode)

    @property
    def dtype(self) -> str | None:
        """Dtype of the stored rows; None if the ops do not determine it."""
        dtype = "uint8" if self.decodes else None
        for op in self.ops:
            if isinstance(op, ToDType | Function):
                dtype = op.dtype or dtype
        return dtype

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of one stored row; None if the ops do not determine it without a sample."""
        shape: tuple[int, ...] | None = None
        for op in self.ops:
            match op:
                case CenterCrop() | RandomResizedCrop() | Resize(size=(_, _)):
                    first = self.ops[0]
                    depth = CHANNELS[first.mode] if isinstance(first, Decode) else None
                    if shape is not None and len(shape) == 3:
                        depth = shape[0]
                    # mypy infers a tuple of any length from an unpacked pair.
                    shape = (depth, *op.size) if depth else None  # type: ignore[misc]
                case Resize():
                    shape = None
                case Function():
                    shape = op.shape or None
        return shape


class Recipe(Declared):
    """The whole recipe: named fields, and the seed of their random ops.

    Examples
    --------
    >>> Recipe.image(resize=256, crop=224).fields["image"].shape
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
    def declared_at(cls, place: Sequence[int | str]) -> type[BaseModel]:
        return Field.declared_at(place[2:]) if len(place) > 2 else cls

    @classmethod
    def image(
        cls,
        *,
        resize: int | tuple[int, int] | None = None,
        crop: int | tuple[int, int] | None = None,
        random_resized_crop: int | tuple[int, int] | None = None,
        flip: bool = False,
        interpolation: Interpolation | None = None,
        mode: Mode | None = None,
        codec: str | None = None,
        seed: int = 0,
        variants: int | None = None,
        bits: int | None = None,
    ) -> Recipe:
        """Make a recipe of one field `image`: decode, then resize, crops and flip, as given.

        Parameters
        ----------
        random_resized_crop, flip
            The random ops of these names, with their defaults.
        interpolation, mode, bits
            As in `Resize` and `Decode`; None for their defaults.
        variants
            Number of random realisations of each sample; see `Field`.
        """
        resampling = _given(interpolation=interpolation)
        ops: list[dict[str, Any]] = [{"op": "decode", **_given(mode=mode, bits=bits)}]
        if resize is not None:
            ops.append({"op": "resize", "size": resize, **resampling})
        if crop is not None:
            ops.append({"op": "center_crop", "size": crop})
        if random_resized_crop is not None:
            ops.append({"op": "random_resized_crop", "size": random_resized_crop, **resampling})
        if flip:
            ops.append({"op": "horizontal_flip"})
        image = {"ops": ops, **_given(codec=codec, variants=variants)}
        return cls.from_dict({"fields": {"image": image}, "seed": seed})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], store: str = "") -> Recipe:
        """Make a recipe from plain data, as in a TOML file or a version's metadata.

        Parameters
        ----------
        store
            Path of the version if the data is its metadata; see `Function`.

        Raises
        ------
        RecipeError
            The data is invalid; the message names the place, the value and the allowed values.
        """
        try:
            recipe = cls.model_validate(data)
        except ValidationError as error:
            raise_recipe_error(cls, error)
        for op in recipe.functions if store else ():
            op._store = store
        for field in recipe.fields.values() if store else ():
            field.model_fields_set.add("variants")  # its build has required it
        return recipe

    @classmethod
    def from_toml(cls, path: str | Path) -> Recipe:
        """Read a recipe from a TOML file: `seed`, and a table ``[fields.NAME]`` for each field."""
        try:
            data = tomllib.loads(Path(path).read_text("utf-8"))
        except OSError as error:
            raise RecipeError(f"cannot read the recipe {path}: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise RecipeError(f"{path} is not TOML: {error}") from None
        return cls.from_dict(data)

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data with every default spelled out.

        `Function.store` is left out: a recipe made from the result counts as the caller's own, so
        its functions run without ``run_functions``.
        """
        return self.model_dump(mode="json")

    def as_stated(self) -> dict[str, Any]:
        """Convert to plain data as `to_dict`, from which it is known what the user stated."""
        data = self.to_dict()
        for name, field in self.fields.items():
            for parameter in field.model_fields_set & set(field.ADDED):
                data["fields"][name][parameter] = getattr(field, parameter)
            for op, written in zip(field.ops, data["fields"][name]["ops"], strict=True):
                for parameter in op.OPEN:
                    written.pop(parameter, None)
                    if op.states(parameter):
                        written[parameter] = getattr(op, parameter)
        return data

    @property
    def functions(self) -> list[Function]:
        """The user's own functions among the ops of all fields."""
        ops = (op for field in self.fields.values() for op in field.ops)
        return [op for op in ops if isinstance(op, Function)]

    def by_array(self) -> Recipe:
        """Return the recipe with a field per stored array: ``image.4`` is variant 4 of `image`."""
        fields = {
            array: field.model_copy(update={"variants": 1, "first_variant": number})
            for name, field in self.fields.items()
            for array, number in arrays_of(name, field).items()
        }
        return self.model_copy(update={"fields": fields})

    def with_fresh_variants(self) -> Recipe:
        """Return the recipe with the oldest variant of each field replaced by a new one.

        Raises
        ------
        RecipeError
            No field has variants.
        """
        varied = {name: field for name, field in self.fields.items() if field.variants > 1}
        if not varied:
            raise RecipeError(
                "no field has variants; build with --variants 4, or variants = 4 in a field with "
                "random ops"
            )
        fresh = {
            name: field.model_copy(update={"first_variant": field.first_variant + 1})
            for name, field in varied.items()
        }
        return self.model_copy(update={"fields": {**self.fields, **fresh}})

    def fingerprint(self, versions: Mapping[str, str]) -> str:
        """Compute the SHA-256 (hex) of the recipe.

        Parameters
        ----------
        versions
            Identity of everything else that decides the pixels, such as code, by name.
        """
        recipe = {"pipeline": self.to_dict(), "ops": OPS_REVISION, "versions": dict(versions)}
        return hashlib.sha256(canonical_json(recipe)).hexdigest()


def _given(**values: Any) -> dict[str, Any]:
    """Return the values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def require_stated_draws(recipe: Recipe) -> None:
    """Raise `RecipeError` if a field draws at random, and nobody chose how often."""
    for name, field in recipe.fields.items():
        random = [op.op for op in field.ops if is_random(op)]
        if random and "variants" not in field.model_fields_set:
            raise RecipeError(
                f"field {name} has random ops ({', '.join(random)}), and variants is not stated: "
                "all epochs would read the same draw. State it: --variants 4 (variants = 4 in the "
                "field) stores four draws, which precache refresh replaces; --variants 1 (variants "
                "= 1) keeps one. Or leave these ops out, store larger images (--resize 256), and "
                "crop and flip anew in every epoch by precache.transforms"
            )


def draws_in_words(recipe: Recipe) -> tuple[str, ...]:
    """Return a line for each field of which all epochs read the same random draw, and one if fields
    that are decoded do not draw alike."""
    lines = [
        f"{name}: all epochs read the same random draw of "
        f"{', '.join(op.op for op in field.ops if is_random(op))}; --variants 4 (variants = 4) "
        "stores several"
        for name, field in recipe.fields.items()
        if field.frozen_draw
    ]
    drawn = {name: _draws(field) for name, field in recipe.fields.items() if field.decodes}
    if len(set(drawn.values())) > 1:
        apart = "; ".join(f"{name} {', '.join(ops) or 'nothing'}" for name, ops in drawn.items())
        lines.append(
            f"fields draw apart, by op and position: {apart}. To move an image and its mask by one "
            "draw, give both fields the same random ops at the same positions"
        )
    return tuple(lines)


def _draws(field: Field) -> tuple[str, ...]:
    """Describe what decides the draws of a field, from a given seed and sample."""
    drawn = []
    for position, op in enumerate(field.ops, 1):
        if is_random(op):
            parameters = op.model_dump(
                exclude_defaults=True, exclude={"op", "size", "interpolation"}
            )
            drawn.append(f"{position}: {op.op}" + (f" {parameters}" if parameters else ""))
    return tuple(drawn)


RESERVED = frozenset({"label", "row", "repeated", "key", "valid", "shards", "rows", "holes"})


def op_texts(field: Field) -> list[str]:
    """Format a field's ops as calls, such as ``resize(size=256)``, without defaults."""
    texts = []
    for op in field.ops:
        parameters = op.model_dump(exclude_defaults=True, exclude={"op"})
        arguments = ", ".join(f"{name}={value}" for name, value in parameters.items())
        texts.append(f"{op.op}({arguments})" if arguments else op.op)
    return texts
