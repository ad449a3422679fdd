"""Ops of a recipe: classes that declare parameters, tell what they make, and compute it.

All that is known of an op stands in its class. `Decode` and `Function` alone are computed by
`precache_workers.ops`, which has the decoders and the user's modules.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args

import numpy as np
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

from precache.errors import SampleError
from precache.recipe.base import Declared, canonical_json
from precache.recipe.resampling import Part, resize, resized_shape, why_unblended

OPS_REVISION = 1
"""Part of every fingerprint."""

MAX_PIXELS = 178_956_970
"""Most pixels of an image by default: Pillow's limit."""

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


Kind = Literal["sample", "image", "mask", "array"]


@dataclass(frozen=True)
class Spec:
    """Kind, dtype and shape of a value, as far as they are known without a sample.

    Attributes
    ----------
    kind
        ``sample``: as the source gives it; ``image``: (H, W, C); ``mask``: an image whose values
        must not be blended; ``array``: any other.
    dtype
        None if it is unknown.
    shape
        Length of each axis, None where it differs or is unknown; None if the axes are unknown.
    least
        Height and width that all images have at least; None if they are unknown.
    usual
        Height and width by which shards are sized where images differ in them.
    differs
        Images are meant to differ in height and width.
    """

    kind: Kind = "sample"
    dtype: str | None = None
    shape: tuple[int | None, ...] | None = None
    least: tuple[int, int] | None = None
    usual: tuple[int, int] = (864, 1152)
    differs: bool = False

    @property
    def is_picture(self) -> bool:
        """True for an image or mask, whose rows are stored as (C, H, W)."""
        return self.kind in ("image", "mask")

    @property
    def channels(self) -> int | None:
        return self.shape[2] if self.shape is not None and len(self.shape) == 3 else None

    @property
    def stored_shape(self) -> tuple[int, ...] | None:
        """Shape of a stored row; None if it is not known entirely."""
        known = tuple(length for length in self.shape or (None,) if length is not None)
        if len(known) < len(self.shape or (None,)):
            return None
        return (known[2], *known[:2]) if self.is_picture and len(known) == 3 else known

    def sized(self, size: tuple[int, int], *, exactly: bool = True) -> Spec:
        """Return the spec with a height and width, or with these as the least ones."""
        rest = None if self.shape is None else self.shape[2:]
        height, width = size if exactly else (None, None)
        shape = None if rest is None else (height, width, *rest)
        return replace(self, shape=shape, least=size, usual=_usual(max(size)), differs=False)


def _usual(width: int) -> tuple[int, int]:
    """Return height and width of a usual photo."""
    return max(1, width * 3 // 4), width


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
Mode = Literal["RGB", "L", "RGBA", "P", "unchanged"]
_CHANNELS: Mapping[Mode, int | None] = {"RGB": 3, "L": 1, "RGBA": 4, "P": 1, "unchanged": None}
"""Mode of `Decode` -> channels of its result; None if they are those of each image."""


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


Computed = Callable[[Any, "np.random.Generator | None"], Any]
"""Computes the output of an op, from a value and, for random ops, a generator."""


@dataclass(frozen=True)
class Scene:
    """The view that an op gives of an image: a part, resized to height and width, then mirrored."""

    part: Part
    size: tuple[int, int]
    mirrored: bool = False


class Operation(Declared):
    """An op of a recipe. Calling it with a value and a random generator computes its output."""

    if TYPE_CHECKING:  # declared by each op
        op: str

    @property
    def is_random(self) -> bool:
        """True if the op draws random numbers; it is then called with a generator."""
        return False

    @property
    def libraries(self) -> tuple[str, ...]:
        """Distributions that compute the op."""
        return ("numpy",)

    @property
    def leaves_pixels_open(self) -> bool:
        """True if the user left the reading of pixels to defaults: of masks, or of 16 bits."""
        return False

    def spec(self, given: Spec) -> Spec:
        """Return the spec of the output.

        Raises
        ------
        ValueError
            The op cannot take such values.
        """
        return replace(given, kind="array") if given.kind == "sample" else given

    def __call__(self, value: Any, random: np.random.Generator | None) -> Any:
        """Compute the output; raises `SampleError` if this value has none."""
        raise NotImplementedError

    def placed(self, following: Operation | None) -> Operation:
        """Return the op with what it takes from the one that a field has behind it."""
        return self

    def before(self, following: Operation) -> Computed:
        """Return what computes a value of which `following` makes the same, for less work."""
        return self

    def part(self, height: int, width: int) -> Part | None:
        """Return the rows and columns that are the output; None if it is no part of the input."""
        return None

    def size_after(self, height: int, width: int) -> tuple[int, int] | None:
        """Return height and width of the output; None if other values than these decide on what
        the output shows. It shows all of the input, but for `part`."""
        part = self.part(height, width)
        return (
            None if part is None else (part[0].stop - part[0].start, part[1].stop - part[1].start)
        )

    def scene(self, height: int, width: int, random: np.random.Generator | None) -> Scene | None:
        """Return what the output shows of an image; None if it is not known."""
        after, whole = self.size_after(height, width), (slice(0, height), slice(0, width))
        return after and Scene(self.part(height, width) or whole, after)

    def tried(self) -> tuple[Operation, ...]:
        """Return the ops of which outputs on probes tell the outputs of this one."""
        return (self,)

    def without_refusals(self) -> Operation:
        """Return an op with the same output for all that this one does not refuse."""
        return self

    def defaults(self) -> set[str]:
        """Return the parameters in `OPEN` that have their defaults."""
        fields = type(self).model_fields
        return {name for name in self.OPEN if getattr(self, name) == fields[name].default}

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.model_dump() == other.model_dump()

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    def __str__(self) -> str:
        """Format as a call, such as ``resize(size=256)``, without defaults."""
        parameters = self.model_dump(exclude_defaults=True, exclude={"op"})
        arguments = ", ".join(f"{name}={value}" for name, value in parameters.items())
        return f"{self.op}({arguments})" if arguments else self.op


class Decode(Operation):
    """Encoded image file -> (H, W, C) uint8, EXIF orientation applied.

    An image that a torch dataset opened with Pillow is taken as it is, orientation included. The
    formats are JPEG, PNG, WebP, BMP, GIF, TIFF, AVIF, and with pillow-heif (``precache[heif]``)
    HEIC. Unless `mode` is ``unchanged``, an image of 32-bit integers or floats becomes a hole.
    Alpha is dropped unless `mode` is ``RGBA`` or ``unchanged``: transparent pixels get the colours
    that are stored beneath. A JPEG of one scan that lacks only its end marker is an image.

    Parameters
    ----------
    mode
        Pillow's name of the colour mode: ``RGB`` (C = 3), ``L`` (grey, C = 1), ``RGBA``; or ``P``
        for masks: the indices of a palette image, or the values of a grey one of 8 bits, as they
        are (C = 1). A palette image in a field of mode ``L``, and any other image in one of mode
        ``P``, becomes a hole. ``unchanged`` keeps values, dtype and channels as the file has them:
        (H, W, C) uint8 or uint16, of TIFFs, which tifffile reads (``precache[tiff]``), of any
        dtype. All images of a field must be alike in these. Palette images become holes.
    bits
        Significant bits of images that are stored with 16, of which the highest 8 are kept: 12 for
        a camera of 12 bits. Larger values make a hole. Where nobody states them, images of 16 bits
        are holes, and a build is refused if many of the samples that it tries are such.
    max_pixels
        A larger image becomes a hole instead of filling the memory.
    scaled
        Let libjpeg decode at 1/2, 1/4 or 1/8 if the resize that follows still shrinks the result:
        if its shorter side has at least so many pixels; True stands for the side of the resize.
        Faster on large photographs; pixels differ by a few levels from a full decode.
    truncated
        ``fill`` keeps an image whose file is cut off, and fills the rest as its decoder does,
        mostly with grey or black. By default it becomes a hole.
    icc
        ``srgb`` converts the colours of an image with an embedded ICC profile to sRGB. By default
        profiles are ignored, as most training code does.
    orientation
        ``exif`` turns and mirrors an image as its EXIF orientation says; ``stored`` leaves its
        pixels as the file has them, for masks that were drawn on these.
    """

    OPEN = ("mode", "orientation")
    TRIED_SIDES: ClassVar = (20, 11, 5)
    """Shorter sides for which scaled decoding is tried: most JPEGs among the probes then shrink to
    1/2, 1/4 and 1/8. libjpeg's method for each scale does not depend on the size of a picture."""

    op: Literal["decode"] = "decode"
    mode: Mode = "RGB"
    bits: Annotated[int, Attribute(ge=8, le=16)] | None = None
    max_pixels: PositiveInt = MAX_PIXELS
    scaled: bool | PositiveInt = False
    truncated: Literal["fill"] | None = None
    icc: Literal["srgb"] | None = None
    orientation: Literal["exif", "stored"] = "exif"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.keeps_values and self.icc:
            raise ValueError(f"icc converts colours, and mode {self.mode!r} keeps values")
        if self.mode == "unchanged" and self.bits is not None:
            raise ValueError("bits says which bits to keep, and mode 'unchanged' keeps all of them")
        return self

    @property
    def keeps_values(self) -> bool:
        """True if values are those of the file, and not colours."""
        return self.mode in ("P", "unchanged")

    @property
    def channels(self) -> int | None:
        """Number of channels; None if they are those of each image."""
        return _CHANNELS[self.mode]

    @property
    def libraries(self) -> tuple[str, ...]:
        return ("pillow", "simplejpeg")

    @property
    def leaves_pixels_open(self) -> bool:
        return not self.keeps_values and (self.bits is None or not self.states("mode"))

    @property
    def shrinks_to(self) -> int | None:
        """Shorter side below which scaled decoding does not go; None for a full decode."""
        return None if isinstance(self.scaled, bool) else self.scaled

    def spec(self, given: Spec) -> Spec:
        if given.kind != "sample":
            raise ValueError("decode must come first")
        kind: Kind = "mask" if self.mode == "P" else "image"
        dtype = None if self.mode == "unchanged" else "uint8"
        return Spec(kind, dtype, (None, None, self.channels))

    def size_after(self, height: int, width: int) -> tuple[int, int] | None:
        return height, width

    def placed(self, following: Operation | None) -> Operation:
        if not self.scaled:
            return self
        nearest = isinstance(following, Resampling) and following.interpolation == "nearest"
        if self.keeps_values or nearest:
            raise ValueError(
                "decode has scaled = true, which blends pixels, and the field keeps values as they "
                "are; leave scaled out"
            )
        if not isinstance(following, Resize):
            return self
        if following.max_size is not None:
            raise ValueError(
                "decode has scaled, which shrinks to a shorter side, and the resize behind it "
                "names max_size; leave scaled out, or give the resize a size"
            )
        side = max(following.least)
        if self.shrinks_to is not None and self.shrinks_to < side:
            raise ValueError(
                f"decode may shrink to {self.shrinks_to} pixels (scaled), which is less than the "
                f"{side} of the resize behind it; give scaled = true"
            )
        return self.model_copy(update={"scaled": self.shrinks_to or side})

    def tried(self) -> tuple[Operation, ...]:
        if self.shrinks_to is None:
            return (self,)
        return tuple(self.model_copy(update={"scaled": side}) for side in self.TRIED_SIDES)

    def without_refusals(self) -> Operation:
        return self.model_copy(update={"bits": None}) if self.bits == 16 else self


class Resampling(Operation):
    """An op that makes new pixels of those around them, unless `interpolation` is ``nearest``."""

    OPEN = ("interpolation",)

    if TYPE_CHECKING:  # declared by each op, behind its size
        interpolation: Interpolation

    @property
    def libraries(self) -> tuple[str, ...]:
        return ("numpy",) if self.interpolation == "nearest" else ("torch",)

    @property
    def leaves_pixels_open(self) -> bool:
        return not self.states("interpolation")

    def spec(self, given: Spec) -> Spec:
        if given.kind == "mask" and self.interpolation != "nearest":
            raise ValueError(
                f"decode keeps indices (mode 'P'), and {self.op} would blend them to others by "
                f'{self.interpolation}; give it interpolation = "nearest" (--interpolation nearest)'
            )
        if given.dtype and (why := why_unblended(given.dtype, self.interpolation)):
            raise ValueError(f"{self.op}: {why}")
        return super().spec(given)


class Resize(Resampling):
    """Resize with antialiasing, to `size` or to at most `max_size`.

    Parameters
    ----------
    size
        An integer is the shorter side, the other is rounded down; a pair is the exact (height,
        width).
    max_size
        The longer side, of images in which it is longer; others are left as they are. Rows keep
        their own shapes.
    interpolation
        ``bilinear``, ``bicubic``, or for masks ``nearest``: the pixels that torchvision's
        ``NEAREST`` takes, without antialiasing.
    """

    op: Literal["resize"] = "resize"
    size: Size | None = None
    max_size: PositiveInt | None = None
    interpolation: Interpolation = "bilinear"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.size is None) == (self.max_size is None):
            raise ValueError("give either size or max_size")
        return self

    @property
    def least(self) -> tuple[int, int]:
        """Height and width that all results have at least."""
        size = self.size or 1
        return size if isinstance(size, tuple) else (size, size)

    def spec(self, given: Spec) -> Spec:
        spec = super().spec(given).sized(self.least, exactly=isinstance(self.size, tuple))
        if isinstance(self.size, int):
            return replace(spec, usual=_usual(self.size * 4 // 3))
        if self.max_size is not None:
            return replace(spec, least=None, usual=_usual(self.max_size), differs=True)
        return spec

    def size_after(self, height: int, width: int) -> tuple[int, int]:
        if self.size is not None:
            return resized_shape(height, width, self.size)
        longer = max(height, width)
        if self.max_size is None or longer <= self.max_size:
            return height, width
        return (
            max(1, height * self.max_size // longer),
            max(1, width * self.max_size // longer),
        )

    def before(self, following: Operation) -> Computed:
        if isinstance(following, CenterCrop):
            return functools.partial(self, crop=following)
        return self

    def __call__(
        self, value: Any, random: np.random.Generator | None, crop: CenterCrop | None = None
    ) -> np.ndarray:
        """Resize; leave out what a crop of the result does not keep."""
        height, width = self.size_after(value.shape[0], value.shape[1])
        if height * width > MAX_PIXELS:
            raise SampleError(f"resized to {width} x {height} px, it is over the limit")
        part = None if crop is None else crop.part(height, width)
        return resize(value, (height, width), self.interpolation, part)


class CenterCrop(Operation):
    """The middle (height, width) of an image; a smaller image becomes a hole."""

    op: Literal["center_crop"] = "center_crop"
    size: HeightWidth

    def spec(self, given: Spec) -> Spec:
        (height, width), least = self.size, given.least
        if least is not None and (height > least[0] or width > least[1]):
            raise ValueError(
                f"the crop of {height} x {width} is larger than the {least[0]} x {least[1]} before "
                f"it; resize to at least {max(self.size)}"
            )
        return super().spec(given).sized(self.size)

    def part(self, height: int, width: int) -> Part | None:
        """Return the middle, rounded as torchvision does."""
        if height < self.size[0] or width < self.size[1]:
            return None
        top, left = round((height - self.size[0]) / 2), round((width - self.size[1]) / 2)
        return slice(top, top + self.size[0]), slice(left, left + self.size[1])

    def __call__(self, value: Any, random: np.random.Generator | None) -> np.ndarray:
        height, width = value.shape[:2]
        part = self.part(height, width)
        if part is None:
            raise SampleError(
                f"{width} x {height} px is smaller than the crop to {self.size[1]} x "
                f"{self.size[0]}; resize to at least {max(self.size)} first"
            )
        cropped: np.ndarray = value[part]
        return cropped


class RandomResizedCrop(Resampling):
    """A random area and aspect ratio of the image, resized to `size`.

    The crop is drawn as in torchvision, by a generator seeded by (recipe seed, key, variant).
    `interpolation` is as in `Resize`.
    """

    op: Literal["random_resized_crop"] = "random_resized_crop"
    size: HeightWidth
    scale: Bounds = (0.08, 1.0)
    ratio: Bounds = (3 / 4, 4 / 3)
    interpolation: Interpolation = "bilinear"

    @property
    def is_random(self) -> bool:
        return True

    @property
    def libraries(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(("numpy", *super().libraries)))

    def spec(self, given: Spec) -> Spec:
        return super().spec(given).sized(self.size)

    def scene(self, height: int, width: int, random: np.random.Generator | None) -> Scene:
        assert random is not None
        return Scene(self._box(height, width, random), self.size)

    def __call__(self, value: Any, random: np.random.Generator | None) -> np.ndarray:
        assert random is not None
        box = self._box(value.shape[0], value.shape[1], random)
        return resize(np.ascontiguousarray(value[box]), self.size, self.interpolation)

    def _box(self, height: int, width: int, random: np.random.Generator) -> Part:
        """Draw a box as torchvision's RandomResizedCrop does."""
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(10):
            area = height * width * random.uniform(*self.scale)
            ratio = math.exp(random.uniform(low, high))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                top = int(random.integers(0, height - h + 1))
                left = int(random.integers(0, width - w + 1))
                return slice(top, top + h), slice(left, left + w)
        ratio = min(max(width / height, self.ratio[0]), self.ratio[1])
        w, h = min(width, round(height * ratio)), min(height, round(width / ratio))
        w, h = max(1, w), max(1, h)
        top, left = (height - h) // 2, (width - w) // 2
        return slice(top, top + h), slice(left, left + w)


class HorizontalFlip(Operation):
    """Mirror left and right with probability `p`, seeded by (recipe seed, key, variant)."""

    op: Literal["horizontal_flip"] = "horizontal_flip"
    p: Annotated[float, Attribute(ge=0, le=1)] = 0.5

    @property
    def is_random(self) -> bool:
        return True

    def __call__(self, value: Any, random: np.random.Generator | None) -> Any:
        assert random is not None
        return value[:, ::-1] if random.random() < self.p else value

    def size_after(self, height: int, width: int) -> tuple[int, int] | None:
        return height, width

    def scene(self, height: int, width: int, random: np.random.Generator | None) -> Scene:
        assert random is not None
        whole = slice(0, height), slice(0, width)
        return Scene(whole, (height, width), random.random() < self.p)


class ToDType(Operation):
    """Convert to `dtype`; with `scale`, integers first become floats in [0, 1].

    They are divided by the maximum of their dtype. A sample with a value beyond `dtype` is bad,
    and so are fractions of 0 to 1 alone for integers.
    """

    op: Literal["to_dtype"] = "to_dtype"
    dtype: DType
    scale: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.scale and not self.dtype.startswith("float"):
            raise ValueError(f"scale maps to [0, 1] and needs a float dtype, not {self.dtype}")
        return self

    def spec(self, given: Spec) -> Spec:
        return replace(super().spec(given), dtype=self.dtype)

    def size_after(self, height: int, width: int) -> tuple[int, int] | None:
        return height, width

    def __call__(self, value: Any, random: np.random.Generator | None) -> np.ndarray:
        array = np.asarray(value)
        if array.dtype.kind not in "biufSU":
            raise SampleError(
                f"to_dtype was given values of {array.dtype}, which are not all real numbers"
            )
        if self.scale and array.dtype.kind in "iu":
            array = array / np.iinfo(array.dtype).max
        converts = array.dtype.kind in "iuf" and self.dtype != "bool"
        if converts and not np.can_cast(array.dtype, self.dtype):
            is_float = self.dtype.startswith("float")
            limits = np.finfo(self.dtype) if is_float else np.iinfo(self.dtype)
            wide = array.astype(np.float64) if array.dtype.kind == "f" else array
            whole = wide if is_float else np.trunc(wide)
            held = (whole >= limits.min) & (
                whole <= limits.max if is_float else whole < int(limits.max) + 1
            )
            held |= is_float & ~np.isfinite(array)
            if array.dtype.kind == "f" and not is_float and array.size and np.abs(array).max() <= 1:
                held &= array == whole  # floats of 0 to 1 would all become 0
            if not held.all():
                value = array[~held].flat[0]
                raise SampleError(f"to_dtype was given {value}, and {self.dtype} does not hold it")
        return array.astype(self.dtype, copy=False)


class Function(Operation):
    """A function of the user's own, ``package.module:function``, called as ``f(array, **params)``.

    In a field that decodes, the array is (H, W, C), and so must be the result if it is an image. A
    class is instantiated with the parameters once per task, and the instance is called.

    Parameters
    ----------
    version
        Text to change whenever the function computes something else. By default a digest of the
        function's code takes its place: what it reaches in its module, and all of your modules that
        this imports; comments do not count.
    dtype, shape
        Dtype and shape of the stored row, if the function changes them: (C, H, W) for images.
    random
        True if the function draws random numbers. It then gets a `numpy.random.Generator` as
        ``random=``, seeded by (recipe seed, key, variant).
    moves
        False states that the function leaves the pixels of images where they are, and changes
        values alone. Of a picture with boxes or keypoints this has to be known.

    Attributes
    ----------
    store
        Path of the version whose recipe names the function; it then runs only if the user allows
        it. Empty if the user's own recipe names it. Not part of the recipe.
    """

    op: Literal["function"] = "function"
    function: FunctionName
    version: str | None = None
    params: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies a default
    dtype: DType | None = None
    shape: tuple[PositiveInt, ...] | None = None
    random: bool = False
    moves: bool = True
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

    @property
    def is_random(self) -> bool:
        return self.random

    @property
    def libraries(self) -> tuple[str, ...]:
        return ()

    def size_after(self, height: int, width: int) -> tuple[int, int] | None:
        return None if self.moves else (height, width)

    def spec(self, given: Spec) -> Spec:
        given, shape = super().spec(given), self.shape or None
        if shape is not None and given.is_picture and len(shape) == 3:
            shape = *shape[1:], shape[0]
        least = None if shape is None or len(shape) < 2 else (shape[0], shape[1])
        return replace(given, dtype=self.dtype or given.dtype, shape=shape, least=least)


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
