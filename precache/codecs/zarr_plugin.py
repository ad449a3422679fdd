"""The image filter as a zarr-python codec, registered by the entry point ``zarr.codecs``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from zarr.abc.codec import ArrayArrayCodec
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import NDBuffer

from precache.codecs.image import IMAGE_FILTER, IMAGE_FILTER_VERSION, filter_image, undo_image


@dataclass(frozen=True)
class ImageFilter(ArrayArrayCodec):
    """Array -> array codec ``precache.image``: same shape, same dtype (uint8)."""

    version: int = IMAGE_FILTER_VERSION
    is_fixed_size = True

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        version = data.get("configuration", {}).get("version")
        if version != IMAGE_FILTER_VERSION:
            raise ValueError(f"image filter version {version!r} is not known; update precache")
        return cls(version)

    def to_dict(self) -> dict[str, Any]:
        return {"name": IMAGE_FILTER, "configuration": {"version": self.version}}

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        return input_byte_length

    async def _encode_single(self, chunk_array: NDBuffer, chunk_spec: ArraySpec) -> NDBuffer:
        filtered: Any = filter_image(chunk_array.as_numpy_array())
        return chunk_spec.prototype.nd_buffer.from_ndarray_like(filtered)

    async def _decode_single(self, chunk_array: NDBuffer, chunk_spec: ArraySpec) -> NDBuffer:
        rows: Any = chunk_array.as_numpy_array().copy()
        undo_image(rows)
        return chunk_spec.prototype.nd_buffer.from_ndarray_like(rows)
