"""Planning: pipeline + listing + receipts -> the version and the shard tasks still to do. Pure."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from precache.declared import canonical_json
from precache.operations import OPS_REVISION, Decode, RandomResizedCrop, Resize, is_random
from precache.pipeline import Field, Pipeline
from precache.receipts import Receipt
from precache.rowtable import RowTable
from precache.sampler import Permutation
from precache.variants import field_of
from workers.code_digest import code_digest

ROW_ORDER_SEED = 0


def order_rows(listing: RowTable, keep_order: bool) -> RowTable:
    """The listing in the order of its rows: a fixed shuffle, so that any run of rows mixes classes.

    Parameters
    ----------
    keep_order
        Keep the order of the listing instead.
    """
    if keep_order:
        return listing
    return listing.take(Permutation(len(listing), "rows", ROW_ORDER_SEED)(np.arange(len(listing))))


installed_version = functools.cache(importlib.metadata.version)
"""Library -> the version that is installed; to read it takes milliseconds."""


def deciding_versions(
    pipeline: Pipeline, known: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """Versions of the libraries and of the custom functions that decide this pipeline's pixels.

    Parameters
    ----------
    known
        Versions of libraries in place of those installed.
    """
    ops = [op for field in pipeline.fields.values() for op in field.ops]
    libraries = []
    if any(isinstance(op, Decode) for op in ops):
        libraries += ["simplejpeg", "pillow"]
    if any(isinstance(op, Resize | RandomResizedCrop) for op in ops):
        libraries.append("torch")
    versions = {
        name: (known.get(name) or installed_version(name)).split("+")[0] for name in libraries
    }
    functions = {op.function: op.version or op.code for op in pipeline.functions}
    found = {name: known or code_digest(name) for name, known in functions.items()}
    return versions | found


def ops_digest(
    pipeline: Pipeline, name: str, count: int, libraries: Mapping[str, str] = MappingProxyType({})
) -> str:
    """SHA-256 (hex) of all that decides what the first `count` ops of a field make of a sample.

    Parameters
    ----------
    pipeline
        With a field for each stored array.
    libraries
        Versions of libraries in place of those installed.
    """
    field = pipeline.fields[name]
    ops = field.ops[:count]
    part = pipeline.model_copy(update={"fields": {name: field.model_copy(update={"ops": ops})}})
    random = any(map(is_random, ops))
    versions = deciding_versions(part, libraries)
    meaning = {
        "ops": [op.model_dump(mode="json") for op in ops],
        "input": [field_of(name)] if field.input is None else field.input,
        "seed": pipeline.seed if random else None,
        "shrunk": shrink_to(field) if count == 1 else None,
        "decodes": field.decodes,
        "revision": OPS_REVISION,
        "versions": versions,
    }
    if random and field.first_variant:
        meaning["variant"] = field.first_variant
    return hashlib.sha256(canonical_json(meaning)).hexdigest()


def shrink_to(field: Field) -> int | None:
    """Shorter side below which DCT-scaled decoding must not go; None where it is not asked for."""
    match field.ops[:2]:
        case (Decode(scaled=True), Resize(size=size)):
            return max(size) if isinstance(size, tuple) else size
        case _:
            return None


def function_digests(pipeline: Pipeline) -> dict[str, str]:
    """Digests of the code of custom functions that declare no version, by function."""
    return {op.function: code_digest(op.function) for op in pipeline.functions if not op.version}


def shards_to_do(
    shards: int, receipts: Mapping[int, Receipt], sizes: Mapping[tuple[str, int], int | None]
) -> list[int]:
    """Shards without a receipt, or whose objects are not as large as it says.

    Parameters
    ----------
    sizes
        (field, shard) -> bytes of the stored object, None where there is none.
    """
    todo = []
    for shard in range(shards):
        receipt = receipts.get(shard)
        if receipt is None or any(
            sizes.get((name, shard)) != made.size for name, made in receipt.objects.items()
        ):
            todo.append(shard)
    return todo


def default_max_failures(rows: int) -> int:
    """Samples that may fail before a build stops: 1%, and at least 5."""
    return max(5, rows // 100)


def sample_for_probe(table: RowTable, count: int) -> list[int]:
    """Rows to learn shapes and sizes from: the listing's first by key, then an even spread."""
    rows = [row for row in range(len(table)) if row not in table.removed]
    first = min(rows, key=table.keys.__getitem__)
    spread = np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(int).tolist()
    return list(dict.fromkeys([first, *(rows[number] for number in spread)]))
