"""The result that a build returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from precache.messages import aligned, as_text, hole_lines, row_types_text, statistics_text
from precache.units import size


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    """The version that a build made, with its counts, bytes and times.

    Attributes
    ----------
    version, path
        The version's id and folder.
    samples, failed
        Number of samples in the source; failed ones among them.
    ignored
        Files of the source that are no images, counted by suffix.
    left_out
        Other entries of the source that are no samples, counted by reason: ``link_out``, links
        that lead out of it; ``no_file``, FIFOs, sockets, devices, and links in an archive;
        ``no_name``, objects with an empty part, ``.`` or ``..`` in their names; ``not_utf8``,
        names that are not UTF-8; ``replaced``, members that a later one of the same name replaces;
        ``repeated``, rows that repeat another; ``same_key``, samples that share a key;
        ``bad_label``, samples whose labels differ or cannot be read.
    mended
        Samples that had failed before and succeeded in this run.
    removed
        Rows, holes included, whose samples were removed from the source.
    rows_reused
        Rows of other versions that were reused, in whole shards or one by one.
    holes
        (key, reason) of every sample that failed.
    shards, shards_skipped, shards_reused
        Shards of the version; shards that existed before this run; shards reused from a base
        version of the same samples.
    raw_bytes, stored_bytes
        Bytes of all large fields, before and after compression.
    seconds, cpu_seconds
        Wall time of this run; CPU time of its tasks.
    timings
        Seconds by stage: ``list`` and ``start`` (of the executor, once) as wall time; ``fetch``,
        ``ops``, ``encode``, ``put`` as wall time summed over tasks.
    classes, mean, std
        Class names; by image field, statistics of each channel in stored units.
    row_types
        By field, dtype and shape of a row, such as ``uint8 (3, 224, 224)``.
    """

    version: str
    path: str
    samples: int
    failed: int
    shards: int
    shards_skipped: int
    raw_bytes: int
    stored_bytes: int
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    holes: Sequence[tuple[str, str]] = ()
    ignored: Mapping[str, int] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)
    shards_reused: int = 0
    rows_reused: int = 0
    removed: int = 0
    mended: int = 0
    timings: Mapping[str, float] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    mean: Mapping[str, list[float]] = field(default_factory=dict)
    std: Mapping[str, list[float]] = field(default_factory=dict)
    row_types: Mapping[str, str] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Raw over stored bytes."""
        return self.raw_bytes / max(1, self.stored_bytes)

    def __str__(self) -> str:
        skipped = self.shards_skipped
        written = self.shards - skipped - self.shards_reused
        mended = f", {self.mended} mended" if self.mended else ""
        reused = f"{self.shards_reused} reused, " if self.shards_reused else ""
        nbytes = f"{size(self.raw_bytes)} raw, {size(self.stored_bytes)} stored"
        rows = [
            ("version", self.version),
            ("path", self.path),
            ("samples", f"{self.samples:,}, {self.failed} failed{mended}"),
            ("row", row_types_text(self.row_types)),
            ("shards", f"{self.shards}: {written} written, {reused}{skipped} already there"),
            ("size", f"{nbytes}: ratio {self.ratio:.2f}"),
            ("time", f"{self.seconds:.1f} s, {self.cpu_seconds:.1f} CPU-s in tasks"),
            ("by stage, s", ", ".join(f"{name} {s:.2f}" for name, s in self.timings.items())),
            *statistics_text(self.mean, self.std),
        ]
        return as_text([*aligned(rows), *hole_lines(self.holes)])
