"""Batched transforms on the device: random for every sample, the same on every run.

The random numbers of a sample depend only on (seed, epoch, row) and the position of the transform:
not on the batch, the number of ranks, or where training was resumed. If a row may come more than
once in an epoch (drawn by weight, or to fill up the last batch), its position in the epoch's order,
which all ranks share, replaces the row number, so that it gets new random numbers each time. Only
transforms that mix samples (`MixUp`, `CutMix`) depend on the batch.

Fields of one scene, such as an image and its mask, move together only if `fields` names them. A
transform that moves or mixes pixels refuses a batch with another field of arrays unless `fields`
says which it changes. Boxes and keypoints, which their recipe declares to be places in a picture,
follow it without being named: they move by the same draw, and are clipped. After the last step that
moves pixels, and before a function of the batch, boxes of which less than a pixel is left across or
down are dropped, together with the entries that belong to them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import itertools
import math
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from precache.codecs.windows import Windows
from precache.errors import UsageError
from precache.recipe.coordinates import Movement
from precache.recipe.ops import Operation
from precache.recipe.resampling import resized_shape
from precache.runtime.integers import MOST_SIDE, sides, whole

Batch = dict[str, torch.Tensor]
Place = tuple[int, ...]
"""Indices of a step in the transforms that it is in, the outermost first."""

Steps = Sequence[tuple[Place, Any]]
"""Steps of a transform with their places, by which they draw."""

GREY = (0.299, 0.587, 0.114)
"""Weights of R, G and B in grey (ITU-R BT.601)."""


NUMBERS = ("label", "row", "repeated")
"""Fields of a batch that number its samples."""

LENGTH = ".length"
"""Ending of the name of the part of a batch with the lengths of the rows of a padded field."""

MOST_CHANNELS = 4
"""Most channels of a picture; a last axis as short as that, behind longer ones, holds channels."""

SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Dtypes that torch moves, but cannot flip -> those of the same size that it can."""


PLACES = "image/places"
"""Part of a batch that tells where windows lie in their pictures; see `View.places`."""

LEAST_SIDE = 1.0
"""Least width and height in pixels of boxes that are kept, as torchvision's sanitizing has it."""


@dataclass(frozen=True)
class Follower:
    """A field with entries (N, longest, …), which are places in a picture or belong to boxes.

    Attributes
    ----------
    kind
        ``boxes``, ``keypoints``, or any other for values that do not move.
    picture
        Field in which the entries are places; empty for values that do not move.
    boxes
        Field of boxes that entries are dropped with; empty for none.
    """

    kind: str
    picture: str = ""
    boxes: str = ""


def _signed(value: int) -> int:
    """Convert a 64-bit pattern to the int64 that torch computes with."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Apply SplitMix64's finalizer to int64; its shifts are logical, hence the masks."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@dataclass(frozen=True)
class Draw:
    """Random numbers for one batch.

    Attributes
    ----------
    key
        Identifies the run, the epoch and the position of the transform.
    step
        Number of the batch in its epoch, for transforms that mix samples.
    numbers
        (N,) int64 on the device that identify the samples: row numbers, or for a row that may have
        come before, -1 minus its position in the epoch's order.
    followers
        Fields of the batch that move as its pictures do.
    moved
        Those that have moved, and still have boxes that are gone; see `without_gone`.
    """

    key: tuple[int | str, ...]
    step: int
    numbers: torch.Tensor
    followers: Mapping[str, Follower] = dataclasses.field(default_factory=dict)
    moved: set[str] = dataclasses.field(default_factory=set, compare=False)

    def inside(self, *path: int) -> Draw:
        """Return the draw of a step by the indices of the transforms that it is in."""
        return replace(self, key=(*self.key, *path))

    def uniform(self, count: int) -> torch.Tensor:
        """Draw (N, count) float32, uniform in [0, 1), a function of (key, number)."""
        seed = int.from_bytes(self._digest(), "little")
        columns = torch.arange(1, count + 1, device=self.numbers.device)
        # Odd multipliers keep distinct (number, column) apart before they are mixed.
        mixed = _mix(
            self.numbers.to(torch.int64)[:, None] * _signed(0x9E3779B97F4A7C15) ^ _signed(seed)
        )
        mixed = _mix(mixed + columns * _signed(0xD1B54A32D192ED03))
        return ((mixed >> 40) & 0xFFFFFF).to(torch.float32) / (1 << 24)

    def part(self, start: int, stop: int) -> Draw:
        """Return the draw of some samples of the batch."""
        return replace(self, numbers=self.numbers[start:stop])

    def numpy(self) -> np.random.Generator:
        """Return a generator on the host, a function of (key, step)."""
        words = [*self._digest(), self.step]
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence(words)))

    def _digest(self) -> bytes:
        return hashlib.blake2b(repr(self.key).encode(), digest_size=8).digest()


def _refuse_call(self: Any, *_: Any, **__: Any) -> Any:
    """Raise `UsageError`: a transform has no random numbers but those of a `Loader`."""
    name = type(self).__name__
    raise UsageError(
        f"{name} is called, and its random numbers come from the Loader; give it as it is, as "
        f"transform={name}(…), and beside functions of a batch as a step of a Compose"
    )


class Transform(ABC):
    """A change of a batch on its device; its random numbers come from `draw` alone."""

    __call__ = _refuse_call

    @abstractmethod
    def apply(self, batch: Batch, draw: Draw) -> Batch:
        """Return the changed batch; the argument is not modified."""


class FieldTransform(Transform):
    """Changes some fields of images, all of them by one draw.

    Attributes
    ----------
    fields
        Names of the fields, which are (N, C, H, W) or (N, H, W); None for ``image`` alone, as long
        as the batch has no other field that would stay behind.
    moves
        True if pixels change places or are mixed: all fields of one scene belong together, and have
        one height and width.
    draws
        True if it draws numbers for each row that was read.
    by_axis
        True if channels, height and width are treated differently.
    """

    fields: tuple[str, ...] | None = None
    moves: ClassVar[bool] = False
    draws: ClassVar[bool] = False
    by_axis: ClassVar[bool] = True

    def __init__(self, fields: Iterable[str] | None = None) -> None:
        self.fields = field_names(fields)

    @property
    def named(self) -> tuple[str, ...]:
        """Names of the fields, as they are given or by default."""
        return self.fields or ("image",)

    def _images(self, batch: Batch, draw: Draw) -> dict[str, torch.Tensor]:
        """Return the fields to change as (N, C, H, W).

        Raises
        ------
        UsageError
            A field is missing, or has another shape or its channels last, or other rows than were
            drawn for, or one would stay behind that nobody named.
        """
        name = type(self).__name__
        fields = [field for field in self.named if field not in draw.followers]
        if self.fields and len(fields) < (len(self.fields) if not self.moves else 1):
            raise UsageError(
                f"{name} changes pixels, and fields={self.fields} names boxes, keypoints or what "
                "belongs to them; name pictures, which these follow where pixels move"
            )
        for field in fields:
            values = batch.get(field)
            if values is None:
                names = ", ".join(batch)
                raise UsageError(
                    f"{name} changes {field!r}, and the batch has {names}; name its fields of "
                    "images, as fields=('image',), and read them with the Loader"
                )
            if values.ndim != 4 and (self.fields is None or values.ndim < 3):
                raise UsageError(f"{name} takes (N, C, H, W), not {tuple(values.shape)}")
            if self.draws and len(values) != len(draw.numbers):
                raise UsageError(
                    f"{name} draws for the {len(draw.numbers)} rows that were read, and the batch "
                    f"has {len(values)}: put functions that leave out or add rows behind it"
                )
            if self.by_axis and _ends_in_channels(values):
                axes = (0, 3, 1, 2) if values.ndim == 4 else (0, 1, 4, 2, 3)
                moved = f"{{**batch, {field!r}: batch[{field!r}].permute{axes}}}"
                raise UsageError(
                    f"{name} takes (N, C, H, W), and {field} {tuple(values.shape)} has its "
                    "channels last. Store (C, H, W), which transpose(2, 0, 1) makes of it; "
                    f"or put this before it, in a Compose: lambda batch: {moved}"
                )
        images = {field: batch[field] for field in fields}
        if self.moves:
            self._require_scene(images, batch, draw)
        return {field: _as_images(values) for field, values in images.items()}

    def _require_scene(self, images: Batch, batch: Batch, draw: Draw) -> None:
        """Raise `UsageError` if fields that belong together stay behind, or differ in size."""
        name = type(self).__name__
        following = following_of(batch, images, draw)
        if following and not isinstance(self, WindowStep):
            raise UsageError(
                f"{name} does not know where the pixels of {' and '.join(images)} go, so that "
                f"{' and '.join(following)} cannot follow: leave it out, or read no such fields, "
                "by fields= of the Loader"
            )
        known = {"image", *NUMBERS, *following}
        others = [key for key in batch if key not in known and _has_axes(batch, key)]
        if self.fields is None and others:
            raise UsageError(
                f"{name} changes image alone, and {', '.join(others)} would stay behind. Give "
                f"fields={('image', *others)} to change all by one draw, or fields=('image',) to "
                "change image alone; fields of kind boxes or keypoints follow it unnamed, other "
                "coordinates take a function of the batch"
            )
        sizes = {field: tuple(values.shape[-2:]) for field, values in images.items()}
        if len({*sizes.values()}) > 1:
            text = ", ".join(f"{field} {h} x {w}" for field, (h, w) in sizes.items())
            raise UsageError(f"{name} takes fields of one height and width, not {text}")


def _has_axes(batch: Mapping[str, Any], name: str) -> bool:
    """Return True for a field whose rows may be pixels or coordinates: not text, nor tokens, which
    differ in length along their only axis."""
    part = batch[name]
    if isinstance(part, list):
        return bool(part) and torch.is_tensor(part[0]) and part[0].ndim > 1
    differs = part.is_nested or f"{name}{LENGTH}" in batch
    return bool(part.ndim > 1 + differs)


def _ends_in_channels(values: torch.Tensor) -> bool:
    """Return True for pictures (N, …, H, W, C), judged by their shape."""
    if values.ndim < 4:
        return False
    height, width, channels = values.shape[-3:]
    return channels <= MOST_CHANNELS < min(height, width)


def _as_images(values: torch.Tensor) -> torch.Tensor:
    """View (N, …, H, W) as (N, C, H, W)."""
    if values.ndim == 4:
        return values
    return values[:, None] if values.ndim == 3 else values.flatten(1, -3)


def _as_before(images: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Undo `_as_images` for changed images of a field that was `before`."""
    if before.ndim == 4:
        return images
    return images.reshape(*before.shape[:-2], *images.shape[-2:])


def field_names(fields: Iterable[str] | None) -> tuple[str, ...] | None:
    """Return names of fields as a tuple; raise `UsageError` if they are something else."""
    if fields is None:
        return None
    names = () if isinstance(fields, str) or not isinstance(fields, Iterable) else tuple(fields)
    if not names or not all(isinstance(name, str) for name in names):
        raise UsageError(f"fields is {fields!r}; give names, such as fields=('image', 'mask')")
    return tuple(dict.fromkeys(names))


class ImageTransform(FieldTransform):
    """Changes the images of each field apart from its other fields, by the same draw."""

    def apply(self, batch: Batch, draw: Draw) -> Batch:
        changed = {
            name: _as_before(self.images(pixels, draw), batch[name])
            for name, pixels in self._images(batch, draw).items()
        }
        return {**batch, **changed}

    @abstractmethod
    def images(self, images: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Return the changed images."""


def following_of(batch: Batch, pictures: Collection[str], draw: Draw) -> list[str]:
    """Return the fields of a batch that follow some pictures, and those that belong to them."""
    moving = [n for n, f in draw.followers.items() if n in batch and f.picture in pictures]
    return [n for n, f in draw.followers.items() if n in batch and {n, f.boxes} & {*moving}]


def follow(batch: Batch, pictures: Collection[str], movement: Movement, draw: Draw) -> Batch:
    """Return the fields that follow some pictures, moved, and note them for `without_gone`."""
    names = following_of(batch, pictures, draw)
    for name in names:
        if name + LENGTH not in batch:
            raise UsageError(
                f"{name} follows {' and '.join(pictures)} in padded rows alone: leave {name} out "
                "of output= of the Loader; its rows are batch[name][n, :batch[name + '.length'][n]]"
            )
    move = {"boxes": movement.boxes, "keypoints": movement.keypoints}
    draw.moved.update(names)
    return {n: move.get(draw.followers[n].kind, lambda v: v)(batch[n]) for n in names}


def without_gone(batch: Batch, draw: Draw) -> Batch:
    """Return a batch without boxes that are gone after all steps that moved pixels.

    Boxes are left out of which less than `LEAST_SIDE` is left across or down, with the entries that
    belong to them; those that are kept come first, in their order, and zeros behind.
    """
    followers, changed = draw.followers, Batch()
    names = [name for name in followers if name in draw.moved]
    draw.moved.clear()
    leaders = {n: f if (f := followers[n].boxes) in names else n for n in names}
    for leader in dict.fromkeys(leaders.values()):
        entries = torch.arange(batch[leader].shape[1], device=batch[leader].device)
        kept = entries < batch[leader + LENGTH][:, None]
        if followers[leader].kind == "boxes":
            corners = batch[leader]
            kept &= (corners[..., 2:] - corners[..., :2] >= LEAST_SIDE).all(-1)
        order, lengths = (~kept).to(torch.int8).argsort(dim=1, stable=True), kept.sum(1)
        for name in [name for name in names if leaders[name] == leader]:
            values = batch[name]
            unlike, on_host = values.shape[:2] != kept.shape, values.device.type == "cpu"
            if on_host and not unlike:  # a CUDA device would have to be waited for
                unlike = not torch.equal(batch[name + LENGTH], batch[leader + LENGTH])
            if unlike:
                raise UsageError(
                    f"{name} {tuple(values.shape)} belongs to {leader} {tuple(kept.shape)}, and "
                    "has other entries, or lengths: a function of the batch before changes one of "
                    "them alone"
                )
            axes = (*kept.shape, *(1,) * (values.ndim - 2))
            in_order = values.gather(1, order.reshape(axes).expand_as(values))
            behind = (entries >= lengths[:, None]).reshape(axes)
            changed |= {name: in_order.masked_fill(behind, 0), name + LENGTH: lengths}
    return {**batch, **changed} if changed else batch


def _constant(
    values: Iterable[float] | Iterable[tuple[float, ...]], like: torch.Tensor
) -> torch.Tensor:
    """Return float32 on the device of `like`, which must not be changed.

    Copied from the host, because creating it on CUDA would wait for all work of the device.
    """
    return _on_host(tuple(values)).to(like.device, non_blocking=like.is_cuda)


@functools.lru_cache(256)
def _on_host(values: tuple[Any, ...]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


class Compose:
    """Transforms, and any callables on the batch, one after another."""

    __call__ = _refuse_call

    def __init__(self, steps: Sequence[Transform | Compose | Callable[[Any], Any]]) -> None:
        if not isinstance(steps, Sequence):
            raise UsageError(f"Compose takes a list of transforms, not {steps!r}")
        self.steps = [require_step("a step of Compose", step) for step in steps]

    def apply(self, batch: Any, draw: Draw) -> Any:
        for index, step in enumerate(self.steps):
            batch = run(step, batch, draw.inside(index))
        return batch


def steps_of(transform: Any, place: Place = ()) -> list[tuple[Place, Any]]:
    """Return the steps of a transform with their places, those within a `Compose` one by one."""
    if transform is None:
        return []
    if not (isinstance(transform, Compose) and type(transform).apply is Compose.apply):
        # Those that look at their first batch look at that of each loader.
        own = isinstance(transform, ColorJitter | Normalize)
        return [(place, copy.copy(transform) if own else transform)]
    within = enumerate(transform.steps)
    return [placed for index, step in within for placed in steps_of(step, (*place, index))]


def require_step(name: str, step: Any) -> Any:
    """Return `step`; raise `UsageError` if it is neither a transform nor a function of a batch."""
    if isinstance(step, type) and issubclass(step, Transform | Compose):
        raise UsageError(f"{name} is the class {step.__name__}; make one, as {step.__name__}(…)")
    is_op = issubclass(step if isinstance(step, type) else type(step), Operation)
    if is_op or not callable(step):
        raise UsageError(
            f"{name} is {step!r}; give one of precache.transforms, several in a Compose, or a "
            "function of a batch"
        )
    if type(step).__module__.startswith("torchvision."):
        raise UsageError(
            f"{name} is {type(step).__name__} of torchvision, which changes one tensor of a dict "
            "alone, and draws once for all rows of a batch. Give one of precache.transforms; or, "
            "of one that draws nothing, lambda batch: {**batch, 'image': step(batch['image'])}"
        )
    return step


def run_all(steps: Steps, batch: Any, draw: Draw) -> Any:
    """Apply the steps of a transform; boxes that are gone are dropped at its end."""
    for place, step in steps:
        batch = run(step, batch, draw.inside(*place))
    return without_gone(batch, draw)


def run(step: Transform | Compose | Callable[[Any], Any], batch: Any, draw: Draw) -> Any:
    """Apply a `Transform` or `Compose`, or call any other callable, which sees no boxes gone."""
    if type(step).__module__ != __name__:
        batch = without_gone(batch, draw)
    return step.apply(batch, draw) if isinstance(step, Transform | Compose) else step(batch)


def is_drawn(steps: Steps) -> bool:
    """Return whether any thread may run some steps: they use the batch and the draw alone."""
    return bool(steps) and all(isinstance(step, Transform) for _, step in steps)


def require_unblended(steps: Steps, masks: Mapping[str, bool]) -> None:
    """Raise `UsageError` if a step would change class numbers without being told to.

    Parameters
    ----------
    masks
        Fields whose values are class numbers, which a bilinear step would make others of -> True
        if that is sure, False if they are only resized as such.
    """
    known = True
    for _, step in steps:
        known = known and type(step).__module__ == __name__  # another may give other values
        is_float = isinstance(step, ToDType) and step.dtype.is_floating_point
        if known and (is_float or isinstance(step, Normalize | ColorJitter | MixUp)):
            for name in step.named:
                if name in masks and (masks[name] or step.fields is None):
                    way = "give fields= the names of pictures alone"
                    if not masks[name]:
                        way += f", or fields=({name!r},) if it has pictures"
                    raise UsageError(
                        f"{type(step).__name__} computes with values, and {name} was built as "
                        f"masks, whose values are class numbers: {way}"
                    )
        if isinstance(step, _Resampling):
            for name in masks.keys() & step.interpolation.keys():
                if step.interpolation[name] == "nearest" or (step.says_how and not masks[name]):
                    continue
                pictures = (
                    "build pictures with mode 'L'" if masks[name] else "'bilinear' for pictures"
                )
                raise UsageError(
                    f"{type(step).__name__} is bilinear, and {name} was built as masks, whose "
                    f"values it would blend: give fields={{{name!r}: 'nearest'}}, or {pictures}"
                )


def require_one_draw(steps: Steps, masks: Mapping[str, bool]) -> None:
    """Raise `UsageError` if random steps would move a mask otherwise than its picture.

    That of a mask is the picture that a step moves together with it, or else each that is moved.

    Parameters
    ----------
    masks
        As in `require_unblended`.
    """
    moving = HorizontalFlip | RandomCrop | RandomResizedCrop | CutMix
    moved: dict[str, list[Any]] = {}
    for _, step in steps:
        for name in step.named if isinstance(step, moving) else ():
            moved.setdefault(name, []).append(step)
    for mask in masks.keys() & moved.keys():
        other_masks = {name for name in masks if masks[name] or not masks[mask]}
        pictures = moved.keys() - other_masks
        together = {name for name in pictures if {*moved[name]} & {*moved[mask]}}
        for name in together or pictures:
            if moved[name] != moved[mask]:
                one, other = (" and ".join(map(_named, moved[n])) for n in (mask, name))
                raise UsageError(
                    f"{mask} is moved by {one}, and {name} by {other}, each by a draw of its own, "
                    f"so that the mask would not lie on its picture: name {name} and {mask} in "
                    f"fields= of each step that moves either"
                )


def require_fitting(
    steps: Steps,
    rows: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    sequences: Mapping[str, Any],
    followers: Mapping[str, Follower],
) -> None:
    """Raise `UsageError` if a transform cannot change batches of such rows.

    Steps are tried on tensors without values, up to the first that is not of this module: it may
    need values, and return anything.

    Parameters
    ----------
    rows
        Field -> shape and dtype of a row.
    sequences
        Parts of a batch of two rows that differ in length.
    followers
        As in `Draw`.
    """
    batch: Any = {
        **sequences,
        **{
            name: torch.empty((2, *shape), dtype=dtype, device="meta")
            for name, (shape, dtype) in rows.items()
        },
    }
    draw = Draw((0, 0), 0, torch.empty(2, dtype=torch.int64, device="meta"), followers)
    normalized = dict[str, Normalize]()
    known = True
    for _, step in steps:
        if isinstance(step, Normalize) and any(step.mean):  # not one that divides alone, as by 255
            for name in step.named:
                if name in normalized:
                    raise UsageError(
                        f"{step} changes {name} a second time, after {normalized[name]}, which "
                        "left its pixels with a mean near 0; remove one of them, or make one "
                        "function of both and what is between"
                    )
                normalized[name] = step
        known = known and type(step).__module__ == __name__
        if known:
            try:
                batch = run_all([((), step)], batch, draw)
            except UsageError:
                raise
            except Exception:  # of a dtype that a device may have; else the first batch raises it
                known = False


def crops(steps: Steps) -> bool:
    """Return True if a transform leaves out parts of images, and boxes with them."""
    cropping = (RandomCrop, CenterCrop, RandomResizedCrop)
    return any(isinstance(step, cropping) for _, step in steps)


def moved_by(steps: Steps) -> list[str]:
    """Return the fields whose pixels a transform moves or mixes."""
    moving = (s for _, s in steps if isinstance(s, FieldTransform) and s.moves)
    return [*dict.fromkeys(name for step in moving for name in step.named)]


class Followed(Transform):
    """Moves what follows ragged pictures, by the windows through which these were read.

    Attributes
    ----------
    pictures
        Their fields.
    size
        Height and width that they were read with.
    """

    def __init__(self, pictures: Collection[str], size: tuple[int, int]) -> None:
        self.pictures, self.size = pictures, size

    def apply(self, batch: Batch, draw: Draw) -> Batch:
        others = {name: values for name, values in batch.items() if name != PLACES}
        movement = movement_of(batch[PLACES], self.size)
        return {**others, **follow(others, self.pictures, movement, draw)}


def _number(name: str, value: Any, least: float, most: float = sys.float_info.max) -> float:
    """Convert to a float; raise `UsageError` if it is no number from `least` to `most`."""
    with contextlib.suppress(OverflowError):
        if isinstance(value, Real) and least <= float(value) <= most:
            return float(value)
    limits = f"to {most:g}" if most < sys.float_info.max else "up"
    raise UsageError(f"{name} is {value!r}; give a number from {least:g} {limits}")


def _range(name: str, value: Any) -> tuple[float, float]:
    """Convert to an ascending pair of numbers above 0; raise `UsageError` for anything else."""
    pair = value if isinstance(value, tuple | list) and len(value) == 2 else (0.0, 0.0)
    low, high = (_number(name, bound, 0) for bound in pair)
    if not 0 < low <= high:
        raise UsageError(f"{name} is {value!r}; give an ascending pair of numbers above 0")
    return low, high


# --- windows of ragged images -------------------------------------------------------------------


class View(NamedTuple):
    """A part of each of N images, resized, of that a part, mirrored after that.

    Attributes
    ----------
    size
        Height and width of what is seen; None if images differ.
    sizes
        (N, 2) height and width, whole numbers, or (1, 2) if all are alike. Those below are so, too;
        float64 of images that differ in size.
    corners, parts
        (N, 2) top and left, and height and width, of the part that takes part in a resize.
    resized
        (N, 2) height and width that it is resized to; None if it is not.
    starts
        (N, 2) top and left of what is seen in it, in its own pixels; None for zeros.
    mirrored
        (N,) bool; None if none is.
    turned
        (N,) bool: mirrored before the resize; None if none was.
    """

    size: tuple[int, int] | None
    sizes: torch.Tensor
    corners: torch.Tensor
    parts: torch.Tensor
    resized: torch.Tensor | None = None
    starts: torch.Tensor | None = None
    mirrored: torch.Tensor | None = None
    turned: torch.Tensor | None = None

    @classmethod
    def whole(cls, sizes: torch.Tensor, size: tuple[int, int] | None = None) -> View:
        """Return the view of whole images of these sizes, which are `size` if it is given."""
        return cls(size, sizes, torch.zeros_like(sizes), sizes)

    def cropped(
        self, corners: torch.Tensor, size: tuple[int, int] | None, sizes: torch.Tensor
    ) -> View:
        """Return a part: (N, 2) top and left, height and width, in what is seen now."""
        if self.mirrored is not None:
            top, left = corners.unbind(1)
            behind = self.sizes[:, 1] - left - sizes[:, 1]
            corners = torch.stack([top, torch.where(self.mirrored, behind, left)], 1)
        sizes = sizes.expand_as(corners)
        seen = self._replace(size=size, sizes=sizes)
        if self.resized is None or bool((self.resized == self.parts).all()):
            # Pixels beside the part take no part in a resize.
            return seen._replace(corners=self.corners + corners, parts=sizes, resized=None)
        starts = corners * (self.parts / self.resized)
        return seen._replace(starts=starts if self.starts is None else self.starts + starts)

    def resized_to(self, size: tuple[int, int] | None, sizes: torch.Tensor) -> View:
        """Return what is seen, which was not resized yet, resized to (N, 2) height and width."""
        sizes = sizes.expand_as(self.sizes)
        return self._replace(size=size, sizes=sizes, resized=sizes, turned=self.mirrored)

    def flipped(self, flips: torch.Tensor) -> View:
        """Return the view with left and right exchanged where `flips` (N,) is true."""
        mirrored = flips if self.mirrored is None else self.mirrored ^ flips
        return self._replace(mirrored=mirrored)

    def _or_none(self, flips: torch.Tensor | None) -> torch.Tensor:
        return self.sizes[:, 0] < 0 if flips is None else flips

    def windows(self) -> Windows:
        """Return where that is in images that differ in size."""
        boxes = torch.cat([self.corners, self.parts], 1)
        scales = torch.ones_like(self.parts) if self.resized is None else self.parts / self.resized
        starts = torch.zeros_like(scales) if self.starts is None else self.starts
        columns = boxes, starts, scales, self._or_none(self.mirrored), self._or_none(self.turned)
        return Windows(*(column.numpy() for column in columns))

    def movement(self) -> Movement:
        """Return where pixels of the images go."""
        assert self.size is not None
        scales = torch.ones_like(self.parts) if self.resized is None else self.resized / self.parts
        starts = self.corners if self.starts is None else self.corners + self.starts
        mirrored, turned = self._or_none(self.mirrored), self._or_none(self.turned)
        # Pixels that are mirrored go one further left than edges, and a resize scales that.
        shifts = torch.where(turned, -scales[:, 1], 0)
        shifts = torch.where(mirrored ^ turned, -1 - shifts, shifts)
        return Movement(starts.flip(1), scales.flip(1), mirrored, shifts, self.size)

    def places(self) -> np.ndarray:
        """Return (N, 6) float32 for `movement_of`, which tells where pixels of the images go."""
        way = self.movement()
        columns = way.starts, way.scales, way.mirrored[:, None], way.shifts[:, None]
        return torch.cat(columns, 1).float().numpy()


def movement_of(places: torch.Tensor, size: tuple[int, int]) -> Movement:
    """Return the movement of pixels that `View.places` tells, to pictures of a size."""
    starts, scales, mirrored, shifts = torch.split(places, [2, 2, 1, 1], 1)
    return Movement(starts, scales, mirrored[:, 0] > 0, shifts[:, 0], size)


class WindowStep(FieldTransform):
    """Chooses what of an image is seen, for all fields of a scene: pictures show it, and boxes and
    keypoints follow. It can be done while rows are read.

    Attributes
    ----------
    resizes
        Whether it resizes; of several steps, one may.
    interpolation
        Field -> ``bilinear`` or ``nearest``, if it resizes.
    padding
        Pixels around an image that it adds; then it cannot be done so.
    """

    moves = True
    resizes: ClassVar[bool] = False
    interpolation: Mapping[str, str] = types.MappingProxyType({})
    padding = 0

    def apply(self, batch: Batch, draw: Draw) -> Batch:
        images = self._images(batch, draw)
        height, width = next(iter(images.values())).shape[2:]
        sizes = _constant([(height, width)], draw.numbers)
        view, changed = self.view(View.whole(sizes, (height, width)), draw), {}
        for name, pixels in images.items():
            show = _nearest if self.interpolation.get(name) == "nearest" else self.shown
            changed[name] = _as_before(show(pixels, view), batch[name])
        if following_of(batch, images, draw):
            changed |= follow(batch, images, view.movement(), draw)
        return {**batch, **changed}

    @abstractmethod
    def view(self, view: View, draw: Draw) -> View:
        """Return what is seen after the step, of what was seen before."""

    @abstractmethod
    def shown(self, images: torch.Tensor, view: View) -> torch.Tensor:
        """Return the pixels of images (N, C, H, W) of which the step made a view."""


@dataclass(frozen=True)
class WindowSteps:
    """The first steps of a transform, done while rows are read.

    Attributes
    ----------
    size
        Height and width of the result.
    nearest
        Fields whose values are not blended.
    places
        `PLACES` if other fields follow the images; else empty.
    """

    placed: Sequence[tuple[Place, WindowStep]]
    size: tuple[int, int]
    nearest: Sequence[str] = ()
    places: str = ""

    def __call__(self, sizes: np.ndarray, draw: Draw) -> View:
        """Return what is seen of images of (N, 2) heights and widths."""
        view = View.whole(torch.from_numpy(sizes.astype(np.float64)))
        for place, step in self.placed:
            view = step.view(view, draw.inside(*place))
        return view


def _named(step: Any) -> str:
    name = step.__name__ if hasattr(step, "__name__") else type(step).__name__
    return f"Resize({step.size})" if isinstance(step, Resize) else str(name)


def _require_whole_scene(
    step: WindowStep,
    ragged: Collection[str],
    dense: Sequence[str],
    where: str,
    followers: Collection[str],
) -> None:
    """Raise `UsageError` if a step does not move all ragged fields, or names others, or leaves
    dense ones behind that nobody spoke of."""
    named, name = step.named, type(step).__name__
    rows = f"rows of {' and '.join(ragged)} of {where} have shapes of their own"
    if lacking := [field for field in ragged if field not in named]:
        fields = _fields_of((*ragged,)) if isinstance(step, _Resampling) else f"fields={(*ragged,)}"
        raise UsageError(
            f"{rows}, and {name} would leave {' and '.join(lacking)} behind: give it {fields}, or "
            "name fewer fields in fields= of the Loader"
        )
    others = [field for field in named if field not in (*ragged, *followers)]
    if missing := [field for field in others if field not in dense]:
        names = ", ".join([*ragged, *dense])
        raise UsageError(f"{name} changes {missing[0]!r}, and the batch has {names}")
    if others or (step.fields is None and dense):
        raise UsageError(
            f"{rows}, and those of {' and '.join(others or dense)} one shape, so that {name} "
            "cannot move both: build fields of one scene with the same resize, or give "
            f"fields={(*ragged,)} if the others may stay behind"
        )


def split_windows(
    steps: Steps,
    ragged: Mapping[str, str],
    dense: Sequence[str],
    where: str,
    followers: Mapping[str, Follower],
) -> tuple[WindowSteps, Steps]:
    """Split a transform into what is done while ragged rows are read, and the steps after that.

    Parameters
    ----------
    ragged
        Field -> dtype.
    dense
        Other fields of arrays.
    followers
        As in `Draw`, of fields that are read; if any moves with the ragged ones, the later steps
        begin with `Followed`.

    Raises
    ------
    UsageError
        Its first steps do not bring the images to one size, or do not move all of them.
    """
    first: list[tuple[Place, WindowStep]] = []
    nearest = list[str]()
    view, draw = View.whole(torch.empty(0, 2)), Draw((), 0, torch.empty(0, dtype=torch.int64))
    for place, step in steps:
        fits = isinstance(step, WindowStep) and not step.padding
        if not fits or (step.resizes and any(before.resizes for _, before in first)):
            break
        if view.size is not None and {*(step.named)} != {*ragged}:
            break  # of a batch, some fields may be changed without the others
        _require_whole_scene(step, ragged, dense, where, followers)
        if isinstance(step, _Resampling):
            for name, how in step.interpolation.items():
                if how == "nearest":
                    nearest.append(name)
                elif ragged[name] != "uint8":
                    raise UsageError(
                        f"{name} of {where} is {ragged[name]}, and rows with shapes of their own "
                        f"are blended as uint8 alone: give fields={{{name!r}: 'nearest'}}"
                    )
        view = step.view(view, draw)
        first.append((place, step))
    size = view.size
    if size is None:
        fields = names = ""
        if [*ragged] != ["image"]:
            fields, names = f", {_fields_of((*ragged,))}", f", fields={(*ragged,)}"
        begins = f", and this one begins with {_named(steps[0][1])}" if steps else ""
        if steps and isinstance(steps[0][1], RandomCrop) and steps[0][1].padding:
            begins += ", whose padding takes images of one size"
        raise UsageError(
            f"rows of {' and '.join(ragged)} of {where} have shapes of their own, and a batch has "
            "one: begin the transform with a crop, as Loader(…, "
            f"transform=RandomResizedCrop(224{fields})), or Compose([Resize(256{fields}), "
            f"CenterCrop(224{names}), …]){begins}; or read rows one by one, by CachedDataset"
        )
    later, places = steps[len(first) :], ""
    if any(follower.picture in ragged for follower in followers.values()):
        later, places = [((), Followed(ragged, size)), *later], PLACES
    return WindowSteps(first, size, nearest, places), later


# --- geometry -----------------------------------------------------------------------------------


class _Resampling(WindowStep):
    """A step that resizes each field by an interpolation of its own.

    Attributes
    ----------
    says_how
        True if the user gave them.
    """

    resizes = True

    def __init__(self, fields: Mapping[str, str] | Iterable[str] | None) -> None:
        super().__init__(fields)
        self.says_how = isinstance(fields, Mapping)
        self.interpolation = dict(fields) if isinstance(fields, Mapping) else {"image": "bilinear"}
        for name, how in self.interpolation.items():
            if how not in ("bilinear", "nearest"):
                raise UsageError(f"fields has {how!r} for {name}; give 'bilinear' or 'nearest'")
        if self.named != (*self.interpolation,):
            raise UsageError(
                f"{type(self).__name__} resamples {' and '.join(self.named)}; say how: "
                f"{_fields_of(self.named)}, where nearest suits masks"
            )


def _nearest(images: torch.Tensor, view: View) -> torch.Tensor:
    """Return pixels of images (N, C, H, W) as a view: those that `nearest_pixels` takes."""
    assert view.size is not None
    corners, parts = view.corners.long(), view.parts.long()
    rows, columns = (
        corners[:, axis, None] + _nearest_pixels(parts[:, axis, None], out)
        for axis, out in enumerate(view.size)
    )
    if len(rows) == 1:
        return images[:, :, rows[0][:, None], columns[0]]
    number = torch.arange(len(images), device=images.device)[:, None, None]
    sampled = images[number, :, rows[:, :, None], columns[:, None, :]]
    return sampled.permute(0, 3, 1, 2).contiguous()


class _Crop(WindowStep):
    """A window of `size` in each image, `padding` zeros included, all at `corners`."""

    def __init__(self, size: int | tuple[int, int], fields: Iterable[str] | None = None) -> None:
        super().__init__(fields)
        self.size = sides("size", size)

    @abstractmethod
    def corners(self, spare: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Return top and left of windows (N, 2) in images that are `spare` pixels higher and
        wider."""

    def view(self, view: View, draw: Draw) -> View:
        for image in [view.size] if view.size else view.sizes.tolist():
            high, wide = (side + 2 * self.padding for side in image)
            if high < self.size[0] or wide < self.size[1]:
                raise UsageError(
                    f"a crop of {self.size[0]} x {self.size[1]} does not fit an image of {high:g} "
                    f"x {wide:g}; put Resize({max(self.size)}) before it"
                )
        sides = _constant([self.size], view.sizes).to(view.sizes.dtype)
        return view.cropped(self.corners(view.sizes - sides, draw), self.size, sides)


class RandomCrop(_Crop):
    """A random window of `size`, after `padding` zeros on every side, of masks, too.

    Parameters
    ----------
    fields
        Fields that are cropped by the same window; see `FieldTransform`.
    """

    draws = True

    def __init__(
        self, size: int | tuple[int, int], padding: int = 0, fields: Iterable[str] | None = None
    ) -> None:
        super().__init__(size, fields)
        self.padding = whole("padding", padding, 0, MOST_SIDE)

    def corners(self, spare: torch.Tensor, draw: Draw) -> torch.Tensor:
        places = (spare + 2 * self.padding + 1).float()
        return (draw.uniform(2) * places).floor() - self.padding

    def shown(self, images: torch.Tensor, view: View) -> torch.Tensor:
        padded = functional.pad(images, (self.padding,) * 4) if self.padding else images
        top, left = (view.corners + self.padding).long().unbind(1)
        windows = padded.unfold(2, self.size[0], 1).unfold(3, self.size[1], 1)
        return windows[torch.arange(len(images), device=images.device), :, top, left]


class CenterCrop(_Crop):
    """The middle of each image, of `size`.

    Parameters
    ----------
    fields
        Fields that are cropped alike; see `FieldTransform`.
    """

    def corners(self, spare: torch.Tensor, draw: Draw) -> torch.Tensor:
        return (spare / 2).round()

    def shown(self, images: torch.Tensor, view: View) -> torch.Tensor:
        (height, width), (high, wide) = self.size, images.shape[2:]
        top, left = round((high - height) / 2), round((wide - width) / 2)  # a device is not asked
        return images[:, :, top : top + height, left : left + width]


class Resize(_Resampling):
    """Resize with antialiasing, bilinearly; a whole number is the shorter side.

    Parameters
    ----------
    fields
        Fields that are resized alike, and the interpolation of each: ``bilinear``, or ``nearest``
        for masks. By default ``image``, bilinear; see `FieldTransform`.
    """

    def __init__(
        self,
        size: int | tuple[int, int],
        fields: Mapping[str, str] | Iterable[str] | None = None,
    ) -> None:
        super().__init__(fields)
        pair = isinstance(size, tuple | list)
        self.size = sides("size", size) if pair else whole("size", size, 1, MOST_SIDE)

    def view(self, view: View, draw: Draw) -> View:
        size = self.size if isinstance(self.size, tuple) else None
        if view.size is not None:
            size = resized_shape(*view.size, self.size)
        before = [] if size else view.sizes.long().tolist()
        each = [size] if size else [resized_shape(h, w, self.size) for h, w in before]
        sizes = _constant(each, view.sizes).to(view.sizes.dtype).reshape(-1, 2)
        return view.resized_to(size, sizes)

    def shown(self, images: torch.Tensor, view: View) -> torch.Tensor:
        pixels = _floats(images)
        resized = functional.interpolate(pixels, view.size, mode="bilinear", antialias=True)
        return _like(resized, images)


class RandomResizedCrop(_Resampling):
    """A random area and aspect ratio of each image, resized bilinearly to `size`.

    Area uniform in `scale`, aspect ratio log-uniform in `ratio`, as torchvision draws them; a box
    that does not fit is narrowed to the image instead of drawn again. Not antialiased, unless rows
    are ragged, which are cropped as they are read: else cache at about the size you train on.

    Parameters
    ----------
    fields
        Fields that are cropped by the same box, and the interpolation of each: ``bilinear``, or
        ``nearest``, which makes no new values and suits masks. By default ``image``, bilinear; see
        `FieldTransform`.
    """

    draws = True

    def __init__(
        self,
        size: int | tuple[int, int],
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        fields: Mapping[str, str] | Iterable[str] | None = None,
    ) -> None:
        super().__init__(fields)
        self.size = sides("size", size)
        self.scale = _range("scale", scale)
        self.ratio = _range("ratio", ratio)

    def view(self, view: View, draw: Draw) -> View:
        height, width = view.sizes.float().unbind(1)
        boxes = self.boxes(height, width, draw).to(view.sizes.dtype)
        part = view.cropped(boxes[:, :2], None, boxes[:, 2:])
        return part.resized_to(self.size, _constant([self.size], boxes).to(boxes.dtype))

    def boxes(
        self, height: int | torch.Tensor, width: int | torch.Tensor, draw: Draw
    ) -> torch.Tensor:
        """(N, 4) float32 top, left, height, width, in whole pixels, of images of these sizes."""
        u = draw.uniform(4)
        area = height * width * (self.scale[0] + u[:, 0] * (self.scale[1] - self.scale[0]))
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        ratio = torch.exp(low + u[:, 1] * (high - low))
        h = torch.sqrt(area / ratio).round().clamp(min=1).clamp(max=height)
        w = torch.sqrt(area * ratio).round().clamp(min=1).clamp(max=width)
        top = (u[:, 2] * (height - h + 1)).floor()
        left = (u[:, 3] * (width - w + 1)).floor()
        return torch.stack([top, left, h, w], 1)

    def shown(self, images: torch.Tensor, view: View) -> torch.Tensor:
        height, width = images.shape[2:]
        (top, left), (h, w) = view.corners.unbind(1), view.parts.unbind(1)
        across = _grid(left, w, self.size[1], width)[:, None, :].expand(-1, self.size[0], -1)
        down = _grid(top, h, self.size[0], height)[:, :, None].expand(-1, -1, self.size[1])
        pixels, grid = _floats(images), torch.stack([across, down], 3)
        sampled = functional.grid_sample(pixels, grid.to(pixels.dtype), align_corners=False)
        return _like(sampled, images)


def _fields_of(names: tuple[str, ...]) -> str:
    return f"fields={ {name: 'bilinear' if name == 'image' else 'nearest' for name in names} }"


def _nearest_pixels(length: torch.Tensor, out: int) -> torch.Tensor:
    """Return (N, out) int64 of lengths (N, 1), as `nearest_pixels` on any device."""
    numbers = torch.arange(out, device=length.device, dtype=torch.float32)
    # By a tensor: CUDA divides by a number as if multiplied by its inverse, which rounds otherwise.
    factors = length.float() / torch.full_like(length, out, dtype=torch.float32)
    return (numbers * factors).long().minimum(length - 1)


def _grid(start: torch.Tensor, length: torch.Tensor, out: int, size: int) -> torch.Tensor:
    """Return (N, out) coordinates in [-1, 1] that resize [start, start + length), all inside it."""
    centres = torch.arange(out, device=start.device, dtype=torch.float32) + 0.5
    pixel = centres * (length[:, None] / out) - 0.5
    pixel = start[:, None] + pixel.clamp(min=0).minimum(length[:, None] - 1)
    return (2 * pixel + 1) / size - 1


class HorizontalFlip(WindowStep):
    """Mirror left and right with probability `p`.

    Parameters
    ----------
    fields
        Fields that are mirrored together; see `FieldTransform`.
    """

    draws = True

    def __init__(self, p: float = 0.5, fields: Iterable[str] | None = None) -> None:
        super().__init__(fields)
        self.p = _number("p", p, 0, 1)

    def view(self, view: View, draw: Draw) -> View:
        return view.flipped(draw.uniform(1)[:, 0] < self.p)

    def shown(self, images: torch.Tensor, view: View) -> torch.Tensor:
        pixels = images.view(SIGNED.get(images.dtype, images.dtype))
        assert view.mirrored is not None
        flips = view.mirrored[:, None, None, None]
        return torch.where(flips, pixels.flip(3), pixels).view(images.dtype)


# --- colour and values --------------------------------------------------------------------------


def _floats(images: torch.Tensor) -> torch.Tensor:
    """Convert to float32, or float64 where that cannot hold all values."""
    is_wide = images.dtype.itemsize > (4 if images.is_floating_point() else 2)
    return images.double() if is_wide else images.float()


def _like(images: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Convert to the dtype of `before`; integers are rounded and clipped to its range."""
    if before.is_floating_point():
        return images.to(before.dtype)
    if before.dtype == torch.bool:
        return images.round_().bool()
    limits = torch.iinfo(before.dtype)
    # The greatest of 64 bits is no float64: the next one up would wrap around.
    most = limits.max if limits.bits < 64 else limits.max - 2047
    return images.round_().clamp_(limits.min, most).to(before.dtype)


def _top(images: torch.Tensor, name: str) -> float:
    """Return the value of full brightness, which is 255 or for floats 1, for the transform `name`.

    Raises
    ------
    UsageError
        It is not known: other integers than uint8 may hold 12 bits, 16 or class numbers.
    """
    if images.is_floating_point():
        return 1.0
    if images.dtype != torch.uint8:
        raise UsageError(
            f"{name} takes integers of 0 to 255, and the pixels are {images.dtype}, whose full "
            "brightness is not known; put a function of the batch before it that gives floats of "
            "0 to 1"
        )
    return 255.0


NEAR = 0.01
"""Distance from 0 to 1 that rounding may bring."""


class ColorJitter(ImageTransform):
    """Brightness, contrast, saturation and hue, changed in this order, on RGB.

    The first three take a factor uniform in [1 - x, 1 + x], at least 0; hue turns by a fraction
    uniform in [-hue, hue] of the colour circle. The arithmetic is torchvision's. Fields that
    `fields` names change by the same factors.
    """

    draws = True

    def __init__(
        self,
        brightness: float = 0,
        contrast: float = 0,
        saturation: float = 0,
        hue: float = 0,
        fields: Iterable[str] | None = None,
    ) -> None:
        super().__init__(fields)
        self.amounts = (
            _number("brightness", brightness, 0),
            _number("contrast", contrast, 0),
            _number("saturation", saturation, 0),
        )
        self._unseen = True
        self.hue = _number("hue", hue, 0, 0.5)

    def images(self, images: torch.Tensor, draw: Draw) -> torch.Tensor:
        top = _top(images, "ColorJitter")
        if self._unseen and images.is_floating_point() and not images.is_meta and len(images):
            self._unseen = False  # on a device, a look waits for it
            least, most = float(images.amin()), float(images.amax())
            if least < -NEAR or most > 1 + NEAR:
                raise UsageError(
                    f"ColorJitter takes floats of 0 to 1, and the pixels are {images.dtype} of "
                    f"{least:.3g} to {most:.3g}; put it before Normalize, or divide pixels of 0 to "
                    "255 by 255 before it"
                )
        pixels = images.float() / top
        u = draw.uniform(4) * 2 - 1
        factors = [
            (1 + u[:, i] * amount).clamp(min=0)[:, None, None, None]
            for i, amount in enumerate(self.amounts)
        ]
        if self.amounts[0]:
            pixels = (pixels * factors[0]).clamp(0, 1)
        if self.amounts[1]:
            mean = _grey(pixels).mean((2, 3), keepdim=True)
            pixels = torch.lerp(mean, pixels, factors[1]).clamp(0, 1)
        if self.amounts[2]:
            pixels = torch.lerp(_grey(pixels), pixels, factors[2]).clamp(0, 1)
        if self.hue:
            pixels = _turn_hue(pixels, (u[:, 3] * self.hue)[:, None, None])
        return _like(pixels * top, images)


def _grey(pixels: torch.Tensor) -> torch.Tensor:
    weights = _constant(GREY, pixels)[None, :, None, None]
    return (pixels * weights).sum(1, keepdim=True)


def _turn_hue(pixels: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Move the HSV hue of RGB in [0, 1] by `turn` (Smith, "Color gamut transform pairs", 1978)."""
    value, low = pixels.amax(1), pixels.amin(1)
    chroma = value - low
    safe = torch.where(chroma == 0, 1.0, chroma)
    red, green, blue = ((value[:, None] - pixels) / safe[:, None]).unbind(1)
    r, g, _ = pixels.unbind(1)
    hue = torch.where(
        r == value, blue - green, torch.where(g == value, 2 + red - blue, 4 + green - red)
    )
    hue = torch.where(chroma == 0, 0.0, hue / 6 + turn) % 1.0
    offsets = _constant([5, 3, 1], pixels)[None, :, None, None]
    k = (offsets + hue[:, None] * 6) % 6
    return value[:, None] - chroma[:, None] * torch.minimum(k, 4 - k).clamp(0, 1)


FAR = 5
"""Least distance from the mean, in std, that pixels do not have on average in the right units."""
FAR_TOP = 32
"""Least ratio of a mean and the brightest pixel that they do not have in the right units."""
LOOKED_AT = 16
"""Images of the first batch by which units are checked."""


def _finite(values: Any) -> list[float]:
    """Convert to numbers, one for each channel; none if they are no finite numbers."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        listed = values.tolist() if hasattr(values, "tolist") else values
        numbers = np.array(listed, np.float64)
        if numbers.ndim and np.isfinite(numbers).all():
            return [float(number) for number in numbers.ravel()]
    return []


class Normalize(ImageTransform):
    """(images - mean) / std by channel, as `dtype`.

    Parameters
    ----------
    mean, std
        In stored units (0 to 255 for uint8), such as ``version.mean["image"]`` and
        ``version.std["image"]`` of ``version = precache.open(uri)``. The first images are checked:
        if mean and std are of another range of pixels, an error names those that fit.
    channels_last
        Use the memory layout that is fastest for convolutions on CUDA.
    fields
        Names of the fields; by default ``image``.
    """

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
        fields: Iterable[str] | None = None,
    ) -> None:
        super().__init__(fields)
        if not getattr(dtype, "is_floating_point", False):
            raise UsageError(f"Normalize gives floats, not {dtype}; give a dtype of torch")
        self.mean, self.std = _finite(mean), _finite(std)
        if not self.mean or len(self.mean) != len(self.std) or min(self.std) <= 0:
            raise UsageError(
                f"Normalize takes a mean and a std above 0 for each channel, not {mean!r} and "
                f"{std!r}; give version.mean['image'] and version.std['image']"
            )
        self.dtype = dtype
        self.channels_last = channels_last
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        self._unseen = True

    def images(self, images: torch.Tensor, draw: Draw) -> torch.Tensor:
        if images.shape[1] != len(self.mean):
            raise UsageError(
                f"Normalize has {len(self.mean)} channels, images {images.shape[1]}; give a mean "
                "and a std for each"
            )
        if self._unseen and not images.is_meta and len(images):
            # On a device, a look waits for it.
            self._unseen = not self._require_units(images[:LOOKED_AT])
        scale = [1 / std for std in self.std]
        shift = [-mean / std for mean, std in zip(self.mean, self.std, strict=True)]
        scales, shifts = (_constant(v, images)[None, :, None, None] for v in (scale, shift))
        out = torch.empty(
            images.shape, dtype=self.dtype, device=images.device, memory_format=self._layout
        )
        pixels = images.float() if images.dtype in SIGNED else images
        return torch.addcmul(shifts, pixels, scales, out=out)  # in one pass over the pixels

    def _require_units(self, images: torch.Tensor) -> bool:
        """Raise `UsageError` if mean and std are of another range than the pixels.

        Returns False if they tell nothing, as all have one value.
        """
        pixels = images.float()
        least, top = float(pixels.amin()), float(pixels.amax())
        if least == top:
            return False
        most, floats = max(self.mean), images.is_floating_point()
        far = floats and top > 0 and (most > FAR_TOP * top or (top <= 1 and most > 2))
        if min(self.std) == max(self.std) == 1:  # a mean is subtracted alone
            far |= not top / FAR_TOP < most < FAR_TOP * top
        else:
            far |= 0 < most * FAR_TOP < min(*self.std, float(pixels.mean()))
            far |= self._distance(pixels) > FAR
        normalized = floats and -FAR_TOP < least < -NEAR and top < FAR_TOP and min(self.mean) > 0
        if normalized and (far or self._distance(pixels) > FAR / 2):
            raise UsageError(
                f"{self} takes pixels from 0 up, and these are {images.dtype} from {least:.4g} to "
                f"{top:.4g}, as normalized ones are: leave Normalize out, or give mean and std of "
                "the stored values"
            )
        if not any(self.mean):  # one without a mean divides alone, but not what was divided
            far = floats and top <= 1 and min(self.std) > FAR_TOP
        if not far:
            return True
        bits = int(top).bit_length()
        more = 2.0 ** max(0, bits + bits % 2 - 8)
        factors = (1, 255, 1 / 255, more, 255 * more)
        inside = [f for f in factors if least <= min(self.mean) * f and most * f <= top] or factors

        def misfit(scale: tuple[float, ...]) -> float:
            mean, std = scale
            return abs(math.log(self._distance(pixels, mean, std))) + (mean != std)

        best = min(set(itertools.product(inside, factors)) - {(1, 1)}, key=misfit)
        raise UsageError(
            f"{self} is of another range than the pixels, which are {images.dtype} from "
            f"{least:.4g} to {top:.4g}. Give {self._scaled(*best)}, or mean and std of the stored "
            "values"
        )

    def _distance(self, pixels: torch.Tensor, mean: float = 1, std: float = 1) -> float:
        """Return the distance of pixels from the mean in std, quadratic mean, above 0."""
        means, stds = (
            _constant(v, pixels)[None, :, None, None] * factor
            for v, factor in ((self.mean, mean), (self.std, std))
        )
        return float(((pixels - means) / stds).square().mean().sqrt().clamp(min=1e-9))

    def __repr__(self) -> str:
        return self._scaled()

    def _scaled(self, mean: float = 1, std: float = 1) -> str:
        """Format this with mean and std multiplied by these factors."""
        means, stds = (
            [float(f"{v * factor:.6g}") for v in values]
            for values, factor in ((self.mean, mean), (self.std, std))
        )
        return f"Normalize({means}, {stds})"


class ToDType(ImageTransform):
    """Convert to `dtype`; uint8 is first divided by 255 where that is a float.

    Floats are not converted to integers. `fields` names the fields; by default ``image``.
    """

    by_axis = False

    def __init__(
        self, dtype: torch.dtype = torch.float32, fields: Iterable[str] | None = None
    ) -> None:
        super().__init__(fields)
        if not isinstance(dtype, torch.dtype):
            raise UsageError(f"dtype is {dtype!r}; give a dtype of torch, such as torch.float16")
        self.dtype = dtype

    def images(self, images: torch.Tensor, draw: Draw) -> torch.Tensor:
        if self.dtype.is_floating_point and not images.is_floating_point():
            return images.to(self.dtype).div_(_top(images, "ToDType"))
        wraps = images.is_floating_point() or (images.dtype, self.dtype) == (
            torch.uint8,
            torch.int8,
        )
        if wraps and not self.dtype.is_floating_point and self.dtype != torch.bool:
            raise UsageError(
                f"ToDType({self.dtype}) is given {images.dtype}, whose values it may not hold; put "
                "a function of the batch that scales and rounds them in its place"
            )
        return images.to(self.dtype)


# --- mixing samples -----------------------------------------------------------------------------


def _beta(alpha: float, count: int, draw: Draw, device: torch.device) -> torch.Tensor:
    """Draw (count,) float32 from Beta(alpha, alpha)."""
    shares = draw.numpy().beta(alpha, alpha, count).astype(np.float32)
    return torch.from_numpy(shares).to(device, non_blocking=device.type == "cuda")


class Mixing(FieldTransform):
    """Mixes each sample with its predecessor in the batch; labels become (N, classes) float32.

    Labels must be from 0 to `classes` - 1. A `Loader` refuses others before its first batch, unless
    a callable of the user comes earlier and may change them. These are checked in each batch on
    the CPU; on a device, where a check would wait for the device, wrong labels become NaN.
    """

    moves = True

    def __init__(self, classes: int, alpha: float, fields: Iterable[str] | None) -> None:
        super().__init__(fields)
        self.classes = whole("classes", classes, 1)
        self.alpha = _number("alpha", alpha, 0)
        if not self.alpha:
            raise UsageError(f"alpha is {alpha!r}; give a number above 0")

    def apply(self, batch: Batch, draw: Draw) -> Batch:
        images = self._images(batch, draw)
        share, mixed = self.mixed(images, draw)
        mixed = {name: _as_before(values, batch[name]) for name, values in mixed.items()}
        return {**batch, **mixed, "label": self._shared(batch, share)}

    @abstractmethod
    def mixed(self, fields: Batch, draw: Draw) -> tuple[torch.Tensor, Batch]:
        """Return the share (N,) that is left of each sample, and the mixed fields."""

    def require(self, labels: np.ndarray, rows: np.ndarray, where: str) -> None:
        """Raise `UsageError` if a label (n,) of rows (n,) is none of the classes."""
        if labels.ndim != 1 or labels.dtype.kind not in "iu":
            raise UsageError(
                f"{where} has labels of {labels.dtype} {labels.shape[1:]}, and "
                f"{type(self).__name__} takes a class number as each label"
            )
        wrong = np.flatnonzero((labels < 0) | (labels >= self.classes))
        if len(wrong):
            first = ", ".join(map(str, rows[wrong[:5]].tolist()))
            raise UsageError(
                f"{where} has the label {labels[wrong[0]]}, and {type(self).__name__} takes 0 to "
                f"{self.classes - 1}; {len(wrong)} rows have such labels, the first ones are "
                f"{first}: leave them out by rows or weights, or give more classes"
            )

    def _shared(self, batch: Batch, share: torch.Tensor) -> torch.Tensor:
        """Return (N, classes) float32: `share` of each label, the rest of its predecessor's."""
        labels = batch.get("label")
        if labels is None:
            raise UsageError(
                f"{type(self).__name__} mixes labels with their images, and the batch has "
                f"{', '.join(batch)}; read 'label' as well, as by fields=('image', 'label') of the "
                "Loader"
            )
        if labels.ndim != 1 or labels.is_floating_point():
            raise UsageError(
                f"{type(self).__name__} takes a whole number as each label, not {labels.dtype} "
                f"{tuple(labels.shape[1:])}; labels are mixed once"
            )
        if labels.device.type == "cpu":
            rows = batch.get("row", torch.arange(len(labels)))
            self.require(labels.numpy(), rows.numpy(), "a batch")
        known = torch.arange(self.classes, device=labels.device)
        one_hot = (labels[:, None] == known).to(torch.float32)
        outside = (labels < 0) | (labels >= self.classes)
        one_hot = one_hot.masked_fill(outside[:, None], math.nan)
        return torch.lerp(one_hot.roll(1, 0), one_hot, share[:, None])


def label_mixing(steps: Steps) -> Mixing | None:
    """Return the first step that mixes labels, unless an earlier step may change them."""
    for _, step in steps:
        if isinstance(step, Mixing):
            return step
        if getattr(type(step), "apply", None) not in (ImageTransform.apply, WindowStep.apply):
            return None
    return None


class MixUp(Mixing):
    """Each image blended with its predecessor in the batch, by a share from Beta(alpha, alpha).

    Labels become (N, classes) float32. Source: Zhang et al., "mixup: Beyond Empirical Risk
    Minimization", ICLR 2018.

    Parameters
    ----------
    fields
        Fields that are blended by the same shares; those beside ``image`` must be floats.
    """

    def __init__(
        self, classes: int, alpha: float = 0.2, fields: Iterable[str] | None = None
    ) -> None:
        super().__init__(classes, alpha, fields)

    def mixed(self, fields: Batch, draw: Draw) -> tuple[torch.Tensor, Batch]:
        for name, images in fields.items():
            if name != "image" and not images.is_floating_point():
                raise UsageError(
                    f"MixUp blends values, and {name} is {images.dtype}: a blend of the class "
                    "numbers of a mask is another class. Use CutMix; if it holds a picture, put "
                    f"ToDType(torch.float32, fields=('{name}',)) before"
                )
        first = next(iter(fields.values()))
        share = _beta(self.alpha, len(first), draw, first.device)
        return share, {name: self._blended(values, share) for name, values in fields.items()}

    def _blended(self, images: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        pixels = _floats(images)
        weights = share.to(pixels.dtype)[:, None, None, None]
        return _like(torch.lerp(pixels.roll(1, 0), pixels, weights), images)


class CutMix(Mixing):
    """A box of each image replaced by the same box of its predecessor in the batch.

    The box keeps the image's aspect ratio and is clipped at its edges; labels become (N, classes)
    float32 by the remaining area. Source: Yun et al., "CutMix", ICCV 2019.

    Parameters
    ----------
    fields
        Fields whose same box is replaced; see `FieldTransform`.
    """

    draws = True

    def __init__(
        self, classes: int, alpha: float = 1.0, fields: Iterable[str] | None = None
    ) -> None:
        super().__init__(classes, alpha, fields)

    def mixed(self, fields: Batch, draw: Draw) -> tuple[torch.Tensor, Batch]:
        images = next(iter(fields.values()))
        height, width = images.shape[2:]
        side = (1 - _beta(self.alpha, len(images), draw, images.device)).sqrt()
        centre = draw.uniform(2)
        rows = _inside(centre[:, 0] * height, side * height, height)
        columns = _inside(centre[:, 1] * width, side * width, width)
        box = rows[:, :, None] & columns[:, None, :]
        share = 1 - box.float().mean((1, 2))
        before = {name: values.roll(1, 0) for name, values in fields.items()}
        return share, {n: torch.where(box[:, None], before[n], v) for n, v in fields.items()}


def _inside(centre: torch.Tensor, length: torch.Tensor, size: int) -> torch.Tensor:
    """Return (N, size) bool: the whole pixels within half of `length` around `centre`."""
    pixels = torch.arange(size, device=centre.device)[None, :]
    start = (centre - length / 2).round()[:, None]
    return (pixels >= start) & (pixels < (centre + length / 2).round()[:, None])
