"""``python -m tests.bench.codec``: which filter and which zstd parameters the `image` codec takes.

Every pair of them goes over the same photos: how small they get, and the CPU time to filter and
compress a row, to decompress it, and to undo the filter over many rows at once.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numcodecs import zstd
from rich.console import Console
from rich.table import Column, Table

from precache.cli.installation import Installation
from precache.codecs.image import (
    LITERAL_COMPRESSION_MODE,
    filter_image,
    image_parameters,
    import_zstd,
    undo_image,
)
from precache.recipe.ops import Decode
from precache_workers.ops.decoding import decode
from precache_workers.ops.functions import center_crop, resize, resized_shape
from tests.bench.common import CROP, find_photos, log, work_folder

RESIZE = 256
TOGETHER = 32
CHOSEN = "H", "and blocks of one channel"


def _parameters() -> dict[str, dict[int, int]]:
    """What a build gives zstd, in steps."""
    chosen = image_parameters(CROP * CROP)
    named = import_zstd().CompressionParameter
    level = {key: chosen[key] for key in (named.compression_level, named.checksum_flag)}
    long = level | {key: chosen[key] for key in (named.min_match, named.hash_log)}
    steps = {key: chosen[key] for key in (named.target_length, LITERAL_COMPRESSION_MODE)}
    return {
        "level 1": level,
        "long matches, small table": long,
        "and steps of 64 bytes": long | steps,
        "and blocks of one channel": chosen,
    }


def _nothing(rows: np.ndarray) -> np.ndarray:
    return rows


def _leave(rows: np.ndarray) -> None:
    pass


def _filter_h_and_w(rows: np.ndarray) -> np.ndarray:
    lines = filter_image(rows)
    out = lines.copy()
    np.subtract(lines[..., 1:], lines[..., :-1], out=out[..., 1:])
    return out


def _undo_h_and_w(rows: np.ndarray) -> None:
    """Prefix sums along W in steps that double, the cheapest that numpy offers; then along H."""
    for start in range(0, len(rows), TOGETHER):
        part = rows[start : start + TOGETHER]
        step = 1
        while step < part.shape[-1]:
            part[..., step:] += part[..., :-step].copy()
            step *= 2
        undo_image(part)


FILTERS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], None]]] = {
    "none": (_nothing, _leave),
    "H": (filter_image, undo_image),
    "H and W": (_filter_h_and_w, _undo_h_and_w),
}


@dataclass(frozen=True)
class Measured:
    """One filter with one set of parameters; CPU-milliseconds per 1,000 rows."""

    filter: str
    parameters: str
    ratio: float
    encode: float
    decode: float
    undo: float


def _crops(files: Sequence[Path], interpolation: str) -> np.ndarray:
    """(n, C, H, W) uint8: the photos, resized and cropped as a build does it."""
    rows = []
    for path in files:
        pixels = decode(path.read_bytes(), Decode())
        shape = resized_shape(*pixels.shape[:2], RESIZE)
        crop = center_crop(resize(pixels, shape, interpolation), (CROP, CROP))
        rows.append(np.ascontiguousarray(crop.transpose(2, 0, 1)))
    return np.stack(rows)


def _cpu_ms(work: Callable[[], None], rows: int, rounds: int) -> float:
    """Median of `rounds`, per 1,000 rows."""
    taken = []
    for _ in range(rounds):
        start = time.thread_time()
        work()
        taken.append(time.thread_time() - start)
    return statistics.median(taken) / rows * 1e6


def _measure(rows: np.ndarray, way: str, parameters: str, rounds: int) -> Measured:
    apply, undo = FILTERS[way]
    compressor = import_zstd().ZstdCompressor(options=_parameters()[parameters])
    compress = functools.partial(compressor.compress, mode=compressor.FLUSH_FRAME)
    frames = [compress(np.ascontiguousarray(apply(row))) for row in rows]
    back = np.empty_like(rows)

    def encode() -> None:
        for row in rows:
            compress(np.ascontiguousarray(apply(row)))

    def decompress() -> None:
        for frame, row in zip(frames, back, strict=True):
            zstd.decompress(frame, row)

    def undo_all() -> None:
        undo(back)

    decoding = _cpu_ms(decompress, len(rows), rounds)
    undoing = _cpu_ms(undo_all, len(rows), 1)
    if not np.array_equal(back, rows):
        raise SystemExit(f"filter {way} is not undone exactly")
    ratio = rows.nbytes / sum(map(len, frames))
    encoding = _cpu_ms(encode, len(rows), rounds)
    return Measured(way, parameters, ratio, encoding, decoding, undoing)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.codec", description=__doc__)
    parser.add_argument("--photos", type=Path, help="folder of photographs")
    parser.add_argument("--rounds", type=int, default=5, help="of each measurement (5)")
    parser.add_argument("--interpolation", choices=("bilinear", "bicubic"), default="bilinear")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    with work_folder(None) as folder:
        _, files = find_photos(options.photos, folder)
        log.print(f"{len(files)} photos, {options.interpolation} resize")
        rows = _crops(files, options.interpolation)
    found = [_measure(rows, f, p, options.rounds) for f in FILTERS for p in _parameters()]
    if options.json:
        measured = [dataclasses.asdict(each) for each in found]
        machine = dataclasses.asdict(Installation.here())
        print(json.dumps({"machine": machine, "measured": measured}))
        return
    table = Table(
        "filter",
        Column("zstd", no_wrap=True),
        *(Column(name, justify="right") for name in ("ratio", "encode", "decode", "undo")),
        title=f"{len(rows)} photos of {CROP} x {CROP} x 3 after a {options.interpolation} resize",
        caption="CPU-ms per 1,000 rows on one core; * marks what a build writes",
    )
    for each in found:
        star = " *" if (each.filter, each.parameters) == CHOSEN else ""
        figures = (
            f"{each.ratio:.2f}",
            f"{each.encode:.0f}",
            f"{each.decode:.0f}",
            f"{each.undo:.0f}",
        )
        table.add_row(each.filter, each.parameters + star, *figures)
    console = Console(highlight=False)
    console.print(table)
    console.print(str(Installation.here()), soft_wrap=True)


if __name__ == "__main__":
    main()
