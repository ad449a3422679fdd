"""Commit: receipts -> small arrays and metadata -> the next entry of the commit log."""

from __future__ import annotations

import importlib.metadata
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from precache import metadata
from precache.codecs import codec_metadata
from precache.pipeline import Pipeline
from precache.receipts import ChannelSums, Receipt
from precache.rowtable import RowTable
from precache.storage import Folder
from precache.store import BUILD, FORMAT, ROOT, append_commit, small_array, string_array
from workers.plan import failures

LIBRARIES = ("precache", "torch", "numpy", "numcodecs", "zstandard", "simplejpeg", "pillow")


@dataclass(frozen=True)
class FieldShape:
    """Row shape, dtype and rows of a chunk of one field."""

    shape: tuple[int, ...]
    dtype: str
    rows_per_chunk: int


@dataclass(frozen=True)
class Finished:
    """A version whose shards are all there."""

    version: str
    fingerprint: str
    rows_digest: str
    pipeline: Pipeline
    table: RowTable
    shapes: Mapping[str, FieldShape]
    rows_per_shard: int
    receipts: Mapping[int, Receipt]


def commit(store: Folder, done: Finished) -> None:
    """Write the small arrays and the metadata, the group's last, then make the version current."""
    folder = Folder(store.path(done.version))
    scratch = f"{BUILD}/tmp"
    for name, data in _objects(done).items():
        folder.put(name, [data], scratch=scratch)
    folder.put(ROOT, [_json(metadata.group_document(_attributes(done)))], scratch=scratch)
    append_commit(store, done.version)
    folder.remove(BUILD)


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1).encode()


def _objects(done: Finished) -> dict[str, bytes]:
    receipts = [done.receipts[shard] for shard in sorted(done.receipts)]
    holes = {row: why for receipt in receipts for row, why in receipt.holes.items()}
    labels = done.table.labels
    if any(receipt.labels for receipt in receipts):
        fetched = np.concatenate([np.array(r.labels or [], np.int64) for r in receipts])
        labels = np.where(labels < 0, fetched, labels)
    valid = np.ones(len(done.table), np.bool_)
    valid[list(holes)] = False
    objects: dict[str, bytes] = {}
    for name, shape in done.shapes.items():
        objects[f"{name}/zarr.json"] = _json(_field_document(done, name, shape))
        table = np.array(
            [(r.objects[name].size, r.objects[name].crc32c) for r in receipts], np.uint64
        )
        _add(objects, f"shards/{name}", small_array(table, ["shard", "size_crc32c"]))
    _add(objects, "label", small_array(narrow(labels), ["row"], fill_value=-1))
    _add(objects, "valid", small_array(valid, ["row"], fill_value=False))
    _add(objects, "key", string_array(done.table.keys, "row"))
    objects["shards/zarr.json"] = _json(metadata.group_document({}))
    keys = done.table.keys
    objects["holes.json"] = _json({row: [keys[row], holes[row]] for row in sorted(holes)})
    reasons = [holes.get(row, "") for row in range(len(done.table))]
    content = [digest for receipt in receipts for digest in receipt.content]
    objects["rows.parquet"] = done.table.to_parquet(reasons, content)
    return objects


def _add(objects: dict[str, bytes], folder: str, files: Mapping[str, bytes]) -> None:
    objects.update({f"{folder}/{name}": data for name, data in files.items()})


def narrow(labels: np.ndarray) -> np.ndarray:
    """Labels in the narrowest signed integer type that holds them and -1."""
    top = int(labels.max(initial=0))
    for dtype in (np.int8, np.int16, np.int32):
        if top <= np.iinfo(dtype).max:
            return labels.astype(dtype)
    return labels.astype(np.int64)


def _field_document(done: Finished, name: str, shape: FieldShape) -> dict[str, Any]:
    codec = done.pipeline.fields[name].codec
    assert codec is not None
    inner = metadata.sharding(
        (shape.rows_per_chunk, *shape.shape), codec_metadata(codec, shape.dtype)
    )
    image = len(shape.shape) == 3 and done.pipeline.fields[name].decodes
    return metadata.array_document(
        (len(done.table), *shape.shape),
        shape.dtype,
        (done.rows_per_shard, *shape.shape),
        [inner],
        fill_value=False if shape.dtype == "bool" else 0,
        dimension_names=["row", "channel", "height", "width"] if image else None,
    )


def _attributes(done: Finished) -> dict[str, Any]:
    receipts = list(done.receipts.values())
    mean, std = channel_statistics(receipts)
    fields = {}
    for name, shape in done.shapes.items():
        codec = done.pipeline.fields[name].codec
        assert codec is not None
        fields[name] = {
            "shape": list(shape.shape),
            "dtype": shape.dtype,
            "codec": codec.name,
            "raw": sum(receipt.objects[name].raw_nbytes for receipt in receipts),
            "stored": sum(receipt.objects[name].size for receipt in receipts),
        }
    own = {
        "format": FORMAT,
        "version": done.version,
        "fingerprint": done.fingerprint,
        "rows_digest": done.rows_digest,
        "rows": len(done.table),
        "holes": len(failures(receipts, done.table.keys)),
        "rows_per_shard": done.rows_per_shard,
        "fields": fields,
        "classes": list(done.table.classes),
        "mean": mean,
        "std": std,
        "pipeline": done.pipeline.to_dict(),
        "libraries": {name: importlib.metadata.version(name) for name in LIBRARIES},
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    return {"precache": own}


def channel_statistics(
    receipts: list[Receipt],
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Mean and standard deviation of each channel, by image field, over all valid rows."""
    mean, std = {}, {}
    for name in receipts[0].sums:
        count, total, squares = _add_sums([receipt.sums[name] for receipt in receipts])
        if count:
            average = total / count
            mean[name] = average.tolist()
            std[name] = np.sqrt(np.maximum(squares / count - average**2, 0)).tolist()
    return mean, std


def _add_sums(sums: list[ChannelSums]) -> tuple[int, np.ndarray, np.ndarray]:
    return (
        sum(each.count for each in sums),
        np.sum([each.total for each in sums], axis=0),
        np.sum([each.squares for each in sums], axis=0),
    )
