"""Names of the objects of a committed version, as its metadata promises them. Pure.

Code that copies, checks or repairs a version uses these names, never a listing of its folder: a
listing may show anything that a user with write access has put there.
"""

from __future__ import annotations

from dataclasses import dataclass

from precache.store.array_metadata import SUMS, is_summed, label_layouts
from precache.store.commit_log import ROOT
from precache.store.json_documents import Attributes
from precache.store.layout import RowShape
from precache.store.small_arrays import KEYS_PER_CHUNK, ROWS_PER_CHUNK
from precache.store.version import HOLES, ROW_TABLE


@dataclass(frozen=True)
class ObjectNames:
    """Names of a version's objects, below its folder.

    Attributes
    ----------
    shards
        Array of a field -> names of its shards, by number.
    small
        Objects of the small arrays, and the metadata documents of all arrays and groups but the
        version's own, `ROOT`.
    """

    shards: dict[str, list[str]]
    small: tuple[str, ...]

    @classmethod
    def of(cls, attributes: Attributes) -> ObjectNames:
        """List the names that a version with these attributes has."""
        rows, count = attributes.rows, -(-attributes.rows // attributes.rows_per_shard)
        shards = {
            name: [f"{name}/c/{number}" + "/0" * len(field.shape) for number in range(count)]
            for name, field in attributes.fields.items()
        }
        small = ["shards/zarr.json", f"rows/{ROOT}", ROW_TABLE, f"holes/{ROOT}", HOLES]
        small += [f"{name}/{ROOT}" for name in shards]
        labels = label_layouts(attributes)[0]
        small += _array("label", rows, labels.chunk_shape[0], "/0" * len(labels.row_shape))
        small += _array("valid", rows, ROWS_PER_CHUNK)
        small += _array("key", rows, KEYS_PER_CHUNK)
        small.append(f"{SUMS}/{ROOT}")
        for name, field in attributes.fields.items():
            small += _array(f"shards/{name}", count, ROWS_PER_CHUNK, "/0")
            if is_summed(attributes.declared[name], RowShape(field.shape, field.dtype)):
                small += _array(f"{SUMS}/{name}", count, ROWS_PER_CHUNK, "/0")
        return cls(shards, tuple(small))


def _array(name: str, length: int, per_chunk: int, tail: str = "") -> list[str]:
    chunks = -(-length // per_chunk)
    return [f"{name}/{ROOT}", *(f"{name}/c/{number}{tail}" for number in range(chunks))]
