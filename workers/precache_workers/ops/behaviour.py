"""Outputs of ops on fixed inputs, the probes: they identify ops independently of library versions.

An op is one step of a field. Its output may depend on the op before it and on the format of its
input, so both are part of the step's name. The digest of the outputs of a step on all its probes
identifies the step, with any versions of its libraries. Files in ``probes/`` are never changed:
each release must compute the same digests for the same pixels.

Outputs are computed once for each state of libraries, processor and code, and kept in the user's
cache folder (XDG Base Directory Specification).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import math
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import xxhash

from precache.codecs import jpeg, raw420
from precache.errors import BuildError, MismatchError, missing_library
from precache.recipe import ops as declared_ops
from precache.recipe import resampling
from precache.recipe.base import canonical_json
from precache.recipe.ops import Decode, Function, Operation, Spec
from precache.recipe.recipe import Field, JpegCodec, LossyCodec

if TYPE_CHECKING:
    from precache_workers.ops.field_recipe import FieldRecipe

PROBES = Path(__file__).parent / "probes"

MOST_PIXELS = 1 << 18
"""Most pixels of a probe for a resize; a large output size may raise the limit."""

LARGEST_PIXELS = 1 << 26
"""Output pixels of a resize or crop above which only its parameters identify it: probes would take
more memory than the plan of a build should."""

FACTORS = (2.3, 1.7), (0.07, 1.3), (0.6, 0.45), (1.0, 1.0), (1.4, 2.9), (3.0, 0.1), (0.93, 1.04)
"""Height and width of probes of an op that makes one size, as multiples of it."""

ALL_VALUES = (129, 131)
"""Height and width of probes of other ops: their values are all those of a byte."""

DRAWS = 8
"""Number of keys with which a random op is tried on each probe."""

MOST_CACHED = 500
"""Most files in the cache of outputs, each up to some 9 KB; the oldest are removed."""

_MODULES = {"pillow": "PIL"}

Outputs = Mapping[str, str]
"""Probe -> digest of a step's output; or the name of the error's class."""


@dataclass(frozen=True)
class Step:
    """An op at its position in a field.

    Attributes
    ----------
    op
        Without what it refuses only.
    before
        The op before it, if both are computed together; None otherwise.
    channels, dtype
        Number of channels and dtype of its input arrays; None if unknown.
    """

    op: Operation
    before: Operation | None = None
    channels: int | None = None
    dtype: str | None = None

    @property
    def name(self) -> str:
        """The computation without libraries, such as ``resize(size=256) of uint8 x 3``; of a
        function of the user its name."""
        if isinstance(self.op, Function):
            return self.op.function
        if isinstance(self.op, Decode):
            return str(self.op)
        after = "" if self.before is None else f" after {self.before}"
        return f"{self.op}{after} of {self.dtype or 'any dtype'} x {self.channels or 'any'}"


def steps_of(field: Field) -> list[Step]:
    """Return a step for each op of a field, and for those of the fields that it follows, and for a
    codec that decides on pixels."""
    steps: list[Step] = []
    for op, given in zip(field.own_ops, field.specs(), strict=False):
        before = steps[-1].op if steps else None
        fused = before is not None and before.before(op) is not before
        steps.append(
            Step(op.without_refusals(), before if fused else None, given.channels, given.dtype)
        )
    codec = field.stored_as
    if isinstance(codec, LossyCodec):
        rows = field.specs()[-1]
        encoding = _Jpeg(quality=codec.quality) if isinstance(codec, JpegCodec) else _Raw420()
        steps.append(Step(encoding, None, rows.channels, rows.dtype))
    return steps if field.follow is None else steps + steps_of(field.follow.fields[0])


class _Jpeg(Operation):
    """The encoding of rows by codec `jpeg`, as an op: it decides on bytes, and by them pixels."""

    op: Literal["jpeg"] = "jpeg"
    quality: int

    @property
    def libraries(self) -> tuple[str, ...]:
        return ("pillow", "simplejpeg")

    def __call__(self, value: np.ndarray, random: np.random.Generator | None) -> np.ndarray:
        file = jpeg.encode_jpeg(value.transpose(2, 0, 1), self.quality)
        return np.frombuffer(file, np.uint8)


class _Raw420(Operation):
    """The encoding of rows by codec `raw420`, as an op."""

    op: Literal["raw420"] = "raw420"

    def __call__(self, value: np.ndarray, random: np.random.Generator | None) -> np.ndarray:
        return raw420.planes_of(value.transpose(2, 0, 1))


# --- probes -------------------------------------------------------------------------------------


def pattern(height: int, width: int, channels: int, dtype: str = "uint8") -> np.ndarray:
    """Return (height, width, channels) with slopes, edges and noise; floats in [0, 2)."""
    tile = _tile(channels)
    values: np.ndarray = tile[np.arange(height) % len(tile)][:, np.arange(width) % tile.shape[1]]
    if dtype.startswith("float"):
        values = values / np.dtype(dtype).type(128)
    return values.astype(dtype, copy=False)


@functools.cache
def _tile(channels: int) -> np.ndarray:
    y, x, c = np.ogrid[:129, :131, :channels]
    slopes = x * 5 + y * 3 + c * 61
    edges = ((x // 7 + y // 5 + c) % 3 == 0) * 120
    noise = (x * 4217 + y * 123 * (x + 7) + c * 40503) >> 7 & 63
    values: np.ndarray = (slopes + edges + noise) & 255
    return values.astype(np.uint8)


def _probes(step: Step) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each probe of a step."""
    if isinstance(step.op, Decode):
        for name, value in _decoded_probes():
            # tifffile, which reads them, is an extra: to install it must not change identities.
            if step.op.mode != "unchanged" or not name.endswith(".tif"):
                yield name, value
        return
    for height, width in _sizes((step.before or step.op).spec(Spec()).least):
        for channels in (step.channels,) if step.channels else (1, 3):
            for dtype in (step.dtype,) if step.dtype else ("uint8", "uint16", "float32"):
                name = f"{dtype} {height} x {width} x {channels}"
                yield name, pattern(height, width, channels, dtype)


def _sizes(made: tuple[int, int] | None) -> list[tuple[int, int]]:
    """Return (height, width) of probes of an op that makes a size, or none of its own."""
    if made is None:
        return [ALL_VALUES]
    if made[0] * made[1] > LARGEST_PIXELS:
        return []
    return [_within(made, made[0] * high, made[1] * wide) for high, wide in FACTORS]


def _within(size: tuple[int, int], height: float, width: float) -> tuple[int, int]:
    most = max(MOST_PIXELS, 2 * size[0] * size[1])
    shrink = min(1.0, math.sqrt(most / (height * width)))
    return max(1, math.ceil(height * shrink)), max(1, math.ceil(width * shrink))


def _decoded_probes() -> Iterator[tuple[str, Any]]:
    from PIL import Image

    for file in sorted(PROBES.iterdir()):
        if file.suffix != ".py":
            yield file.name, file.read_bytes()
    yield from _probes_of_much_metadata()
    colours = Image.fromarray(pattern(15, 24, 4))
    for mode in ("RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "YCbCr", "HSV", "F", "I", "RGBa"):
        yield f"image {mode}", colours.convert("RGB" if mode == "P" else mode).convert(mode)
    yield "image La", colours.convert("LA").convert("La")
    wide = pattern(15, 24, 1, "uint16")[..., 0] * np.uint16(257)
    yield "image I;16", Image.fromarray(wide)
    for channels in (1, 3, 4):
        yield f"array x {channels}", pattern(15, 24, channels)
    yield "array", pattern(15, 24, 1)[..., 0]
    yield "array of floats", pattern(15, 24, 3, "float32")
    # A tensor is decoded like its array, so an array replaces it: torch takes a second to load.
    yield "tensor", pattern(15, 24, 3)


def _probes_of_much_metadata() -> Iterator[tuple[str, bytes]]:
    """Yield files with more metadata than is read, which would be large in ``probes/``."""
    turned, cmyk, png = (
        (PROBES / name).read_bytes()
        for name in ("jpeg-turned-6.jpg", "jpeg-cmyk.jpg", "png-turned.png")
    )
    exif, jfif = b"\xff\xe1\xff\xffExif\0\0", b"\xff\xe0\xff\xffJFIF\0\0"
    for name, data, segment in ("turned-6", turned, exif), ("cmyk", cmyk, jfif):
        many = segment + bytes(65_537 - len(segment))
        yield f"jpeg-{name}.jpg behind segments", data[:2] + many * 17 + data[2:]
    chunk = struct.pack(">I", 1 << 20) + b"eXIf" + bytes((1 << 20) + 4)
    yield "png-turned.png behind a chunk", png[:33] + chunk + png[33:]


# --- outputs ------------------------------------------------------------------------------------


@functools.cache
def computed(step: Step) -> Outputs:
    """Compute the outputs of a step on its probes."""
    from precache_workers.ops.field_recipe import FieldRecipe

    outputs: dict[str, str] = {}
    for op in step.op.tried():
        ops: tuple[Operation, ...] = (op,) if step.before is None else (step.before, op)
        if isinstance(op, Decode):  # which refuses what bits do not decide
            ops = (op.model_copy(update={"bits": op.bits or 16}),)
        recipe = FieldRecipe("probe", Field().model_copy(update={"ops": ops}), 0)
        for name, value in _probes(step):
            for draw in range(DRAWS if op.is_random else 1):
                probe = f"{name}, draw {draw}" if op.is_random else name
                output = _output(recipe, step, value, f"{draw}")
                if outputs.setdefault(probe, output) != output:  # of another op that is tried
                    outputs[f"{probe} by {op}"] = output
    return outputs


def _output(recipe: FieldRecipe, step: Step, value: Any, key: str) -> str:
    try:
        return _digest(np.asarray(recipe.apply(value, 0, None, key)))
    except Exception as error:  # in a build, it would make a hole
        if isinstance(error, MemoryError) or "alloc" in str(error):  # torch's is a RuntimeError
            raise BuildError(
                f"memory does not suffice to try {step.name} on its probes: {error}"
            ) from None
        return type(error).__name__


def _digest(array: np.ndarray) -> str:
    what = f"{array.dtype.str} {array.shape}".encode()
    return xxhash.xxh3_64_hexdigest(what + np.ascontiguousarray(array).tobytes())


def digest_of(outputs: Outputs) -> str:
    """Return XXH3-128 (hex) of the outputs of a step."""
    return xxhash.xxh3_128_hexdigest(canonical_json({**outputs}))


def first_difference(before: Outputs, after: Outputs) -> str:
    """Return the first probe whose output differs, and how many do, in words."""
    probes = [probe for probe in after if before.get(probe) != after[probe]]
    probes = probes or [probe for probe in before if probe not in after]
    return f"{probes[0]}; {len(probes)} of {len(after)} probes differ"


# --- kept on disk -------------------------------------------------------------------------------


@functools.cache
def outputs_of(step: Step) -> Outputs:
    """Return the outputs of a step, from the cache if nothing has changed since."""
    name = f"{_state(step)}.json"
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # RuntimeError: no home folder
        loaded = json.loads((_folder() / name).read_bytes())
        if isinstance(loaded, dict) and all(isinstance(text, str) for text in loaded.values()):
            return loaded
    outputs = computed(step)
    with contextlib.suppress(OSError, RuntimeError):  # without a cache, compute it each time
        _write_cache(_folder() / name, outputs)
    return outputs


@contextlib.contextmanager
def cleared_on_mismatch() -> Iterator[None]:
    """Clear the cache if the block raises `MismatchError`.

    In that case, libraries may have changed in a way that `_state` does not detect.
    """
    try:
        yield
    except MismatchError:
        clear_cache()
        raise


def clear_cache() -> None:
    """Clear the cache of outputs."""
    outputs_of.cache_clear()
    with contextlib.suppress(RuntimeError):
        shutil.rmtree(_folder(), ignore_errors=True)


def _folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if home.startswith("/") else Path("~/.cache").expanduser()) / "precache/ops"


def _write_cache(file: Path, outputs: Outputs) -> None:
    file.parent.mkdir(0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent)
    try:
        with os.fdopen(handle, "w") as temporary:
            json.dump(outputs, temporary)
        Path(name).replace(file)
        oldest = sorted(file.parent.iterdir(), key=lambda path: path.stat().st_mtime)
        for path in oldest[:-MOST_CACHED]:
            path.unlink(missing_ok=True)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def _state(step: Step) -> str:
    """Return a digest of what may change the outputs of a step.

    A change that it does not show, as of a system library, ends in a `MismatchError`.
    """
    state = [
        step.name,
        [op.model_dump(mode="json") for op in (step.before, step.op) if op is not None],
        [_files(name) for name in sorted({*step.op.libraries, "numpy"})],
        _own_code(),
        _processor(),
    ]
    return xxhash.xxh3_128_hexdigest(canonical_json(state))


@functools.cache
def _files(library: str) -> list[Any]:
    """Return the location and version of a library, and size and time of the files of its folder
    and of the list of all that was installed."""
    module = _MODULES.get(library, library)
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise missing_library("building", module)
    home = Path(spec.origin).parent
    state: list[Any] = [str(home), installed_version(library)]
    # A folder's time tells of compiled files that a first import leaves in it, too.
    files = {path for path in home.iterdir() if path.is_file()}
    for path in sorted(files.union(home.parent.glob(f"{library}-*/RECORD"))):
        status = path.stat()
        state.append((path.name, status.st_size, status.st_mtime_ns))
    return state


@functools.cache
def _own_code() -> str:
    modules = [Path(module.__file__ or "") for module in (declared_ops, resampling, jpeg)]
    own = [*modules, *sorted(Path(__file__).parent.glob("*.py")), *sorted(PROBES.iterdir())]
    return xxhash.xxh3_128_hexdigest(b"".join(path.read_bytes() for path in own))


@functools.cache
def _processor() -> list[str]:
    """Return the processor features and environment variables by which libraries choose kernels."""
    named = {f"{k}={v}" for k, v in os.environ.items() if k.startswith(("ATEN_", "JSIMD_", "NPY_"))}
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open("rb") as file:
        first = file.read(1 << 14).split(b"\n\n")[0].decode(errors="replace").splitlines()
        named |= {line for line in first if line.startswith(("model name", "flags", "Features"))}
    return sorted(named)


installed_version = functools.cache(importlib.metadata.version)
"""Library -> installed version; cached, since reading it takes milliseconds."""
