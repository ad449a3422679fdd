"""Versions as an attacker may forge them: whatever was changed, their digests are right."""

import contextlib
import json
import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash
import zarr

from precache.codecs import kernels
from precache.store.layout import decode_index
from precache.store.tree import Leaf, seal_of, spare_objects

_SMALL = ("label", "valid", "key", "rows", "holes", "shards", "_checks", "_sums")

MEMORY = 1 << 30
"""Bytes of memory that reading a store of a few kilobytes may ask for."""

_DIGEST = re.compile(rb'("digest": ")[0-9a-f]{32}')


def settled_root(document: Any) -> bytes:
    """A root with the digest that it has to have."""
    blank = _DIGEST.sub(rb"\g<1>" + b"0" * 32, json.dumps(document, indent=1).encode(), 1)
    return _DIGEST.sub(rb"\g<1>" + xxhash.xxh3_128_hexdigest(blank).encode(), blank, 1)


def put_root(version: Path, document: Any) -> bytes:
    """Write a version's root with its digest, there and in the store's log, and return it."""
    root = settled_root(document)
    (version / "zarr.json").write_bytes(root)
    for entry in version.parent.glob("commits/*.json"):
        commit = json.loads(entry.read_bytes())
        if commit["version"] == version.name:
            entry.write_text(json.dumps({**commit, "root": seal_of(root)}))
    return root


def edit_root(version: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a version's root says of the version."""
    document = json.loads((version / "zarr.json").read_bytes())
    change(document["attributes"]["precache"])
    put_root(version, document)


def settle(version: Path) -> None:
    """Make the digests of a version, and in its store's log, those of what lies there."""
    document: Any = json.loads((version / "zarr.json").read_bytes())
    own = document["attributes"]["precache"]
    if isinstance(own, dict) and isinstance(own.get("objects"), dict):
        found = (path for folder in _SMALL for path in (version / folder).rglob("*"))
        names = [path.relative_to(version).as_posix() for path in found if path.is_file()]
        for name in dict.fromkeys([*own["objects"], *names]):
            if (version / name).is_file():
                data = (version / name).read_bytes()
                own["objects"][name] = [len(data), Leaf.of(name, data).hex]
    root = put_root(version, document)
    if isinstance(own, dict) and isinstance(own.get("objects"), dict):
        paths = (version / name for name in own["objects"])
        objects = [path.read_bytes() for path in paths if path.is_file()]
        for name, data in spare_objects(root, objects).items():
            (version / name).write_bytes(data)


def forge_head(version: Path, name: str, head: bytes) -> None:
    """Begin the first chunk of a ragged array, of codec raw, with `head`; all sums are right."""
    path = version / name / "c/0"
    checks: Any = zarr.open_array(version / "_checks" / name, mode="r+")
    data, chunks = bytearray(path.read_bytes()), checks.shape[1]
    start, nbytes = decode_index(memoryview(data)[-(16 * chunks + 4) :], chunks)[0].tolist()
    end = start + nbytes - 4
    data[start : start + len(head)] = head
    checks[0, 0] = kernels.crc32c(data[start:end])
    data[end : end + 4] = kernels.crc32c(data[start:end]).to_bytes(4, "little")
    digest = xxhash.xxh3_128_intdigest(data)
    leaves: Any = zarr.open_array(version / "shards" / name, mode="r+")
    leaves[0] = [len(data), digest >> 64, digest & 2**64 - 1]
    path.write_bytes(data)
    settle(version)


def forge_shape(version: Path, name: str, row: int, shape: tuple[int, ...]) -> None:
    """State another shape of a row of a ragged array."""
    shapes: Any = zarr.open_array(version / f"{name}.shape", mode="r+")
    shapes[row] = shape
    settle(version)


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """What asks for more than `MEMORY` ends in a `MemoryError`."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
