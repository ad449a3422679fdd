"""The declared recipe of a cached dataset: fields, their ops and codecs, and its fingerprint.

A recipe is plain data, from Python, a TOML file or flags. It has one canonical JSON, so that equal
recipes have the same fingerprint however they were written.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    NonNegativeInt,
    SerializerFunctionWrapHandler,
    SkipValidation,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic import Field as Attribute

from precache.errors import RecipeError
from precache.recipe.base import Declared, canonical_json, raise_recipe_error
from precache.recipe.ops import (
    OPS,
    OPS_REVISION,
    CenterCrop,
    Decode,
    Function,
    Interpolation,
    Mode,
    Op,
    Operation,
    RandomResizedCrop,
    Resampling,
    Resize,
    Spec,
    ToDType,
)
from precache.recipe.variants import arrays_of, field_of, variants_text

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


class JpegCodec(Declared):
    """JPEG files, for pictures of 1 or 3 channels: those of the source where they have the pixels
    of the row, else encoded at `quality`, which loses."""

    channels: ClassVar[tuple[int, ...]] = (1, 3)
    name: Literal["jpeg"] = "jpeg"
    quality: Annotated[int, Attribute(ge=1, le=100)] = 90


class Raw420Codec(Declared):
    """Plain bytes of Y, Cb and Cr, of which the last two have half the height and width, for
    pictures in colours: half the bytes of `raw`, and some loss."""

    channels: ClassVar[tuple[int, ...]] = (3,)
    name: Literal["raw420"] = "raw420"


LossyCodec = JpegCodec | Raw420Codec
"""Codecs that change pixels. Each row is a chunk of its own."""

AnyCodec = RawCodec | ZstdCodec | ImageCodec | LossyCodec
CODEC_CLASSES: dict[Any, type[BaseModel]] = {
    codec.model_fields["name"].default: codec for codec in get_args(AnyCodec)
}
"""Class of each codec, by its name."""


def _codec(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


Codec = Annotated[AnyCodec, Attribute(discriminator="name"), BeforeValidator(_codec)]


FieldKind = Literal["text", "bytes", "ragged", "boxes", "keypoints"]
"""Kinds of fields whose rows differ in length."""

_DTYPES: dict[FieldKind | None, str] = {
    "text": "uint8", "bytes": "uint8", "boxes": "float32", "keypoints": "float32",
}  # fmt: skip
"""Dtypes of rows that their kind determines."""


class Field(Declared):
    """One cached tensor of every sample: the ops that make it and the codec that stores it.

    Parameters
    ----------
    ops
        Ops, in order. In a field that decodes, they see (H, W, C) arrays, and the result is stored
        as (C, H, W).
    codec
        Name, or a dict such as ``{"name": "zstd", "level": 3}``: ``image``, ``zstd``, ``raw``,
        ``raw420`` or ``jpeg``. By default ``image`` for decoded uint8 images, ``zstd`` of level 3
        for masks (``decode`` keeps values), else ``zstd`` of level 1.
    input
        Part of the sample that the ops start from: a column of a table, a suffix of members of tar
        archives, a folder of a pair, or an item of a dict or tuple. By default the image, or of a
        `kind` the column of the field's name; of a dict the part of that name, else the first.
    kind
        Given where rows differ in length: ``text`` (str), ``bytes``, ``boxes`` (n, 4) float32,
        ``keypoints`` (n, …, 2 or more) float32, or ``ragged``: arrays or lists of numbers whose
        first axis differs. A list of whole numbers is int64, of others float32. Their ops are
        functions, and of ``ragged`` also `to_dtype`. By default rows are images, masks or arrays.
    of
        Field that this one belongs to. Boxes and keypoints are x, y in pixels of a picture as
        ``decode`` gives it, by default of the field ``image``: its ops move them by the same draws
        and clip boxes; boxes of which a crop leaves nothing are dropped. A field of kind ``ragged``
        or ``keypoints`` may belong to one of boxes: entry i to box i, and is dropped with it.
    variants
        Number of random realisations of each sample, each stored as an array of its own: epoch e
        reads the one whose number is e modulo `variants`. A build requires it of a field with
        random ops: with 1, all epochs read the same draw.
    first_variant
        Number of the first variant. By default that of the store's current version, which
        `precache refresh` increments.
    """

    OPEN = ("variants", "first_variant")

    ops: tuple[Op, ...] = ()
    codec: Codec | None = None
    input: str | int | None = None
    kind: FieldKind | None = None
    of: str | None = None
    variants: Annotated[int, Attribute(ge=1, le=MAX_VARIANTS)] = 1
    first_variant: NonNegativeInt = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        pairs = zip(self.ops, (*self.ops[1:], None), strict=False)
        ops = tuple(op.placed(following) for op, following in pairs)
        object.__setattr__(self, "ops", ops)
        fixed = self.fixed_ops == len(self.ops) and not self.belongs  # else to a field that draws
        if (self.variants, self.first_variant) != (1, 0) and fixed:
            raise ValueError(
                f"variants is {self.variants}, but no op is random, so all would be the same: "
                "add random_resized_crop, horizontal_flip or a function with random = true, or "
                "leave variants out"
            )
        spec = self.specs()[-1]
        shape = spec.stored_shape or (None, None, None)
        if self.codec is None:
            image = spec.kind == "image" and spec.dtype == "uint8" and len(shape) == 3
            codec = ImageCodec() if image else ZstdCodec(level=3 if spec.kind == "mask" else 1)
            object.__setattr__(self, "codec", codec)
        if isinstance(self.codec, ImageCodec) and spec.dtype not in (None, "uint8"):
            raise ValueError(f"codec 'image' stores uint8, not {spec.dtype}; use zstd or raw")
        if isinstance(self.codec, ImageCodec) and len(shape) != 3:
            raise ValueError(f"codec 'image' stores (C, H, W) rows, not {shape}; use zstd")
        if isinstance(self.codec, LossyCodec) and (why := self._why_no_loss(spec)):
            raise ValueError(f"codec '{self.codec.name}' loses, and {why}; use image, raw or zstd")
        if self.kind is not None:
            self._require_kind(self.kind)
        return self

    def _why_no_loss(self, spec: Spec) -> str:
        """Return why a codec that loses cannot store the rows; empty if it may."""
        if spec.kind != "image":
            return f"keeps no values of a field of {'masks' if spec.kind == 'mask' else 'arrays'}"
        if any(getattr(op, "interpolation", None) == "nearest" for op in self.ops):
            return "interpolation 'nearest' says that values are to be kept, as those of masks"
        if spec.dtype not in (None, "uint8"):
            return f"stores uint8, not {spec.dtype}"
        assert isinstance(self.codec, LossyCodec)
        if spec.channels not in (None, *self.codec.channels):
            stored = " or ".join(map(str, self.codec.channels))
            return f"stores {stored} channels, not {spec.channels}"
        return ""

    def _require_kind(self, kind: FieldKind) -> None:
        """Raise `ValueError` for what rows of a kind cannot be made by, or stored as."""
        takes = "functions and to_dtype" if kind == "ragged" else "functions"
        for op in self.own_ops:
            if not isinstance(op, Function) and not (isinstance(op, ToDType) and kind == "ragged"):
                raise ValueError(f"a field of kind {kind!r} takes {takes}, not {op.op}")
            if isinstance(op, Function) and (op.shape or (op.dtype and kind in _DTYPES)):
                known = "dtype and shape" if kind in _DTYPES else "shape"
                raise ValueError(f"rows of kind {kind!r} need no {known} of {op.function}")
        if isinstance(self.codec, ImageCodec):
            raise ValueError(f"codec 'image' stores images, not {kind}; use zstd or raw")

    @model_serializer(mode="wrap")
    def _declared(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = handler(self.model_copy(update={"ops": self.own_ops}))
        return data

    @property
    def belongs(self) -> bool:
        """True if entries are places in a picture, or belong to boxes."""
        return self.kind in ("boxes", "keypoints") or self.of is not None

    @property
    def follow(self) -> Follow | None:
        """The last op of a field that belongs to another one of its recipe."""
        last: Operation | None = self.ops[-1] if self.ops else None
        return last if isinstance(last, Follow) else None

    @property
    def decode(self) -> Decode | None:
        """The op that decodes the pictures of the field; None if it has none."""
        first: Operation | None = self.ops[0] if self.ops else None
        return first if isinstance(first, Decode) else None

    @property
    def is_mask(self) -> bool:
        """True if pictures keep their values: by their mode, or as no op that resizes blends."""
        resized = {op.interpolation for op in self.ops if isinstance(op, Resampling)}
        return (self.decode is not None and self.decode.keeps_values) or resized == {"nearest"}

    @property
    def own_ops(self) -> tuple[Op, ...]:
        """The ops that are declared."""
        return self.ops if self.follow is None else self.ops[:-1]

    @classmethod
    def declared_at(cls, place: Sequence[int | str]) -> type[BaseModel]:
        if len(place) > 1:
            return OPS[place[2]] if place[0] == "ops" else CODEC_CLASSES[place[1]]
        return cls

    @property
    def states_one_draw(self) -> bool:
        """True if the user stated that all epochs read the same draw, where one is random."""
        return self.variants == 1 and self.states("variants")

    @property
    def stored_as(self) -> AnyCodec:
        """`codec`, which validation has filled in."""
        assert self.codec is not None
        return self.codec

    @property
    def leaves_pixels_open(self) -> bool:
        """True if the user left the reading of pixels to defaults: of masks, or of 16 bits; or if
        samples say which pixels lose."""
        return isinstance(self.codec, LossyCodec) or any(op.leaves_pixels_open for op in self.ops)

    @property
    def fixed_ops(self) -> int:
        """Number of ops before the first random one, whose result all variants share."""
        return next((n for n, op in enumerate(self.ops) if op.is_random), len(self.ops))

    @property
    def leaves_variants_open(self) -> bool:
        """True if the field has variants, but no explicit number of the first."""
        return self.variants > 1 and not self.states("first_variant")

    def specs(self) -> list[Spec]:
        """Return the spec of the value that each op is given, and last that of the rows.

        Raises
        ------
        ValueError
            An op cannot take what the ones before it make.
        """
        specs = [Spec()]
        for op in self.ops:
            specs.append(op.spec(specs[-1]))
        return specs

    @property
    def decodes(self) -> bool:
        """True if the rows are images, which are stored as (C, H, W)."""
        return self.specs()[-1].is_picture

    @property
    def ragged_size(self) -> tuple[int, int] | None:
        """Height and width by which shards are sized if rows differ in them; None if none can."""
        spec = self.specs()[-1]
        sized = spec.stored_shape is not None or (spec.shape is not None and len(spec.shape) != 3)
        other = not spec.is_picture or spec.dtype not in (None, "uint8")
        return None if sized or other else spec.usual

    @property
    def differs(self) -> bool:
        """True if rows are meant to differ in height and width."""
        return self.specs()[-1].differs and self.ragged_size is not None

    @property
    def dtype(self) -> str | None:
        """Dtype of the stored rows; None if the ops do not determine it."""
        return _DTYPES.get(self.kind) or self.specs()[-1].dtype

    @property
    def usual_nbytes(self) -> int:
        """Bytes of a row by which shards are sized where rows differ in length."""
        return 1 << 10 if self.kind in ("text", "bytes") else 4 << 10

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of one stored row; None if the ops do not determine it without a sample."""
        return self.specs()[-1].stored_shape


class Follow(Operation):
    """Does to entries of a field what the ops of a picture do, as the last op of that field.

    A `Recipe` adds it to a field that belongs to another; it is no part of what is declared.

    Attributes
    ----------
    names, fields
        The fields that decide: the boxes that the entries belong to, if they do, and the picture.
    """

    op: Literal["follow"] = "follow"
    names: tuple[str, ...]
    fields: tuple[SkipValidation[Field], ...]

    def __str__(self) -> str:
        return f"follow({', '.join(self.names)})"

    @property
    def is_random(self) -> bool:
        return any(op.is_random for field in self.fields for op in field.ops)

    @property
    def libraries(self) -> tuple[str, ...]:
        return ("torch",)


# `c` has the chunks of an array, and arrays called as fields lie within others, as `shards/image`.
RESERVED = frozenset({"label", "row", "repeated", "key", "valid", "shards", "rows", "holes", "c"})


def field_name(name: str) -> str:
    """Return the name of a field; raises `ValueError` if no field can have it."""
    if name in RESERVED or name.startswith("_") or not name.isidentifier():
        raise ValueError(
            f"a field cannot be called '{name}': use a plain identifier without a leading "
            "underscore, other than " + ", ".join(sorted(RESERVED))
        )
    return name


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
            field_name(name)
        self._follow()
        return self

    def _follow(self) -> None:
        """Let fields that belong to others follow them; boxes first, to which others may."""
        belonging = {name: field for name, field in self.fields.items() if field.belongs}
        for name, field in sorted(belonging.items(), key=lambda item: item[1].kind != "boxes"):
            self.fields[name] = self._following(name, field)

    def _following(self, name: str, field: Field) -> Field:
        """Return a field that belongs to another with the op that follows it.

        Raises
        ------
        ValueError
            It cannot belong to that field, or the field has an op of which it is not known where it
            moves pixels.
        """
        of = field.of or "image"
        leader = self.fields.get(of)
        if leader is None:
            raise ValueError(
                f"field {name} belongs to {of!r}, and the fields are {', '.join(self.fields)}; "
                f'name its picture, as of = "…" in [fields.{name}]'
            )
        by_boxes = leader.kind == "boxes" and field.kind in ("keypoints", "ragged")
        if not by_boxes and not (leader.decodes and field.kind in ("boxes", "keypoints")):
            raise ValueError(
                f"field {name} of kind {field.kind!r} cannot belong to {of}: boxes and keypoints "
                "belong to an image that is decoded, and ragged entries and keypoints to boxes"
            )
        names: tuple[str, ...] = (of,)
        fields: tuple[Field, ...] = (leader,)
        if leader.follow is not None:
            names, fields = (of, *leader.follow.names), (leader, *leader.follow.fields)
        picture = self.fields[names[-1]]
        for op in picture.ops:
            if isinstance(op, Function) and op.moves:
                raise ValueError(
                    f"{op.function} may move pixels of {names[-1]}, and {name} would not follow: "
                    "state moves = false in its op if it leaves them where they are; else apply it "
                    "in a dataset of your own, to both"
                )
            if isinstance(op, Decode) and op.scaled:
                raise ValueError(
                    f"decode has scaled, which rounds the size of {names[-1]}, and {name} has to "
                    "follow exactly; leave scaled out"
                )
        plain = {"codec": ZstdCodec(), "variants": 1, "first_variant": 0}
        leaders = tuple(one.model_copy(update=plain) for one in fields)
        follow = Follow(names=names, fields=leaders)
        changes: dict[str, Any] = {"ops": (*field.own_ops, follow), "of": of}
        if follow.is_random:
            if field.states("variants") and field.variants != leader.variants:
                raise ValueError(
                    f"field {name} has variants = {field.variants}, and {of}, which it follows, "
                    f"{leader.variants}; leave it out"
                )
            changes |= {"variants": leader.variants, "first_variant": leader.first_variant}
        stated = field.model_fields_set | {"of"} | (leader.model_fields_set & {"variants"})
        following = field.model_copy(update=changes)
        following.__pydantic_fields_set__.clear()
        following.__pydantic_fields_set__.update(stated)
        return following

    @classmethod
    def declared_at(cls, place: Sequence[int | str]) -> type[BaseModel]:
        return Field.declared_at(place[2:]) if len(place) > 2 else cls

    @classmethod
    def image(
        cls,
        *,
        resize: int | tuple[int, int] | None = None,
        max_size: int | None = None,
        crop: int | tuple[int, int] | None = None,
        random_resized_crop: int | tuple[int, int] | None = None,
        flip: bool = False,
        interpolation: Interpolation | None = None,
        mode: Mode | None = None,
        codec: Literal["image", "raw", "raw420", "zstd", "jpeg"] | None = None,
        quality: int | None = None,
        seed: int = 0,
        variants: int | None = None,
        bits: int | None = None,
        truncated: Literal["fill"] | None = None,
        icc: Literal["srgb"] | None = None,
    ) -> Recipe:
        """Make a recipe of one field `image`: decode, then resize, crops and flip, as given.

        Parameters
        ----------
        resize
            The shorter side, or exact height and width. Without a crop, a shorter side leaves rows
            of many shapes, where images differ in theirs.
        max_size
            The longer side, at most: rows keep the shapes of their images, to be cropped at random
            while training.
        crop
            Centre crop after the resize.
        random_resized_crop
            A random part of the image, resized to this.
        flip
            Mirror each image with probability 1/2.
        interpolation
            ``bilinear`` (default) and ``bicubic`` are antialiased; ``nearest`` keeps the values of
            masks.
        mode
            Colours; by default ``RGB``; ``P`` for the values of masks; ``unchanged`` for all bits
            and channels.
        codec
            ``image`` (lossless; default), ``raw`` (fastest, largest), ``raw420`` (half of its
            bytes; loses), ``zstd`` (any reader), ``jpeg`` (smallest, slowest; loses, unless a
            photo's file can stay as it is).
        quality
            Of codec ``jpeg`` for rows that are encoded anew, 1 to 100; by default 90.
        seed
            Seed of random ops.
        variants
            Number of random realisations of each sample that are kept: epoch e reads number e
            modulo this; needed with random ops.
        bits
            Significant bits of images that are stored with 16, which else become holes.
        truncated
            ``fill`` keeps images whose files are cut off, and fills the rest; by default they
            become holes.
        icc
            ``srgb`` converts the colours of images with an ICC profile; by default it is ignored.
        """
        resampling = _given(interpolation=interpolation)
        if resampling and resize is max_size is random_resized_crop is None:
            raise RecipeError("interpolation says how to resize; give resize with it (--resize)")
        decode = _given(mode=mode, bits=bits, truncated=truncated, icc=icc)
        ops: list[dict[str, Any]] = [{"op": "decode", **decode}]
        if resize is not None:
            ops.append({"op": "resize", "size": resize, **resampling})
        if max_size is not None:
            ops.append({"op": "resize", "max_size": max_size, **resampling})
        if crop is not None:
            ops.append({"op": "center_crop", "size": crop})
        if random_resized_crop is not None:
            ops.append({"op": "random_resized_crop", "size": random_resized_crop, **resampling})
        if flip:
            ops.append({"op": "horizontal_flip"})
        stored: Any = codec
        if quality is not None:
            if codec != "jpeg":
                raise RecipeError("quality is that of codec jpeg; give codec jpeg (--codec jpeg)")
            stored = {"name": codec, "quality": quality}
        image = {"ops": ops, **_given(codec=stored, variants=variants)}
        return cls.from_dict({"fields": {"image": image}, "seed": seed})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Recipe:
        """Make a recipe from plain data, as in a TOML file or a version's metadata.

        Raises
        ------
        RecipeError
            The data is invalid; the message names the place, the value and the allowed values.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise_recipe_error(cls, error)

    def of_store(self, path: str) -> Recipe:
        """Return the recipe of the version at a path; its functions need ``run_functions``."""
        recipe = self.model_copy(deep=True)
        for op in recipe.functions:
            op._store = path
        for field in recipe.fields.values():
            field.model_fields_set.add("variants")  # its build has required it
            field.model_fields_set.discard("first_variant")  # a refresh may have replaced it
            for step in field.ops:  # a store does not tell whether its defaults were stated
                step.model_fields_set.difference_update(step.defaults())
        return recipe

    @classmethod
    def from_toml(cls, path: str | Path) -> Recipe:
        """Read a recipe from a TOML file: `seed`, and a table ``[fields.NAME]`` for each field."""
        try:
            data = tomllib.loads(Path(path).read_text("utf-8-sig"))
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
            written = data["fields"][name]
            ops = zip(field.own_ops, written["ops"], strict=True)
            for model, own in ((field, written), *ops):
                for parameter in model.OPEN:
                    if not model.states(parameter):
                        del own[parameter]
        return data

    @property
    def leaves_pixels_open(self) -> bool:
        """True if some field leaves the reading of pixels to defaults."""
        return any(field.leaves_pixels_open for field in self.fields.values())

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
        for array, field in fields.items():
            if not self.fields[field_of(array)].states_one_draw:
                field.model_fields_set.discard("variants")
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
        return self.with_first_variants({n: f.first_variant + 1 for n, f in varied.items()})

    def with_first_variants(self, numbers: Mapping[str, int]) -> Recipe:
        """Return the recipe with other first variants of some fields, and of what follows these."""
        fields = dict(self.fields)
        for name, number in numbers.items():
            fields[name] = fields[name].model_copy(update={"first_variant": number})
        recipe = self.model_copy(update={"fields": fields})
        recipe._follow()
        return recipe

    def fingerprint(self, versions: Mapping[str, str]) -> str:
        """Compute the SHA-256 (hex) of the recipe.

        Parameters
        ----------
        versions
            Identity of everything else that decides the pixels, such as code, by name.
        """
        identity = {"recipe": self.to_dict(), "ops": OPS_REVISION, "versions": dict(versions)}
        return hashlib.sha256(canonical_json(identity)).hexdigest()


def mask_pairs(fields: Mapping[str, Field]) -> list[tuple[str, str]]:
    """Return each field that is a mask with the image that it lies on: the first other.

    Names are those of fields, or of arrays of a variant.
    """
    named = {field_of(name): name for name, field in fields.items() if field.decode}
    masks = [name for name in named.values() if fields[name].is_mask]
    images = [name for name in named.values() if name not in masks] or masks
    return [(mask, images[0]) for mask in masks if mask != images[0]]


def crop_pairs(fields: Mapping[str, Field]) -> list[tuple[str, str]]:
    """Return each field of which a crop is drawn with the first such field, named as in
    `mask_pairs`."""
    named = {field_of(name): name for name, field in fields.items() if field.decode}
    cropped = [
        name
        for name in named.values()
        if any(isinstance(op, RandomResizedCrop) for op in fields[name].ops)
    ]
    return [(name, cropped[0]) for name in cropped[1:]]


def _given(**values: Any) -> dict[str, Any]:
    """Return the values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def require_stated_draws(recipe: Recipe) -> None:
    """Raise `RecipeError` if a field draws at random, and nobody chose how often."""
    for name, field in recipe.fields.items():
        random = [op.op for op in field.own_ops if op.is_random]
        if random and not field.states("variants"):
            raise RecipeError(
                f"field {name} has random ops ({', '.join(random)}), and variants is not stated: "
                "all epochs would read the same draw. State it: --variants 4 (variants = 4 in the "
                "field) stores four draws, which precache refresh replaces; --variants 1 (variants "
                "= 1) keeps one. Or leave these ops out, store larger images (--resize 256), and "
                "crop and flip anew in every epoch by precache.transforms",
                ways=[("--variants", "4"), ("--variants", "1")],
            )


def draws_in_words(recipe: Recipe) -> tuple[str, ...]:
    """Return a line for each field of which all epochs read the same random draw, and one if fields
    that are decoded do not draw alike."""
    lines = [
        f"{name}: all epochs read the same random draw of {', '.join(random)}; --variants 4 "
        "(variants = 4) stores several"
        for name, field in recipe.fields.items()
        if (random := [op.op for op in field.own_ops if op.is_random]) and field.variants == 1
    ]
    drawn = {name: _draws(field) for name, field in recipe.fields.items() if field.decodes}
    if len(set(drawn.values())) > 1:
        apart = "; ".join(f"{name} {', '.join(ops) or 'nothing'}" for name, ops in drawn.items())
        lines.append(
            f"fields draw apart, by op and position: {apart}. To move an image and its mask by one "
            "draw, give both fields the same random ops at the same positions, and variants"
        )
    return tuple(lines)


def _draws(field: Field) -> tuple[str, ...]:
    """Describe what decides the draws of a field, from a given seed and sample."""
    drawn = [f"variants {variants_text(field)}"] if field.variants > 1 else []
    crops = [at for at, op in enumerate(field.ops, 1) if isinstance(op, RandomResizedCrop)]
    for position, op in enumerate(field.ops, 1):
        is_before = position < max(crops, default=0) and isinstance(op, Resize | CenterCrop)
        if op.is_random or is_before:
            exclude = {"op", "interpolation"} if is_before else {"op", "size", "interpolation"}
            parameters = op.model_dump(exclude_defaults=True, exclude=exclude)
            drawn.append(f"{position}: {op.op}" + (f" {parameters}" if parameters else ""))
    return tuple(drawn)
