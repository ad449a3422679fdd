"""Kinds of sources, selected by scheme, suffix or name."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from precache.errors import SourceError, UsageError
from precache.messages import shown
from precache.storage.local import local_path
from precache.storage.open import StorageOptions, open_folder
from precache_workers.sources import manifests
from precache_workers.sources.arrow_tables import ArrowFormat, is_saved_dataset, saved_files
from precache_workers.sources.base import (
    IMAGES_ALONE,
    NO_COLUMNS,
    Source,
    SourceSpec,
    container_noun,
    unread_container,
)
from precache_workers.sources.container_names import Containers
from precache_workers.sources.containers import ContainerSource, Format
from precache_workers.sources.dataset import DatasetSource
from precache_workers.sources.folder import FolderSource
from precache_workers.sources.lmdb_databases import LMDBFormat
from precache_workers.sources.numpy_arrays import ArrayFiles, NumpyFormat
from precache_workers.sources.paired_folders import open_paired
from precache_workers.sources.parquet_tables import ParquetFormat
from precache_workers.sources.tar_archives import TarFormat
from precache_workers.sources.tf_records import TFRecordFormat
from precache_workers.sources.zip_archives import ZipFormat
from precache_workers.user_code.identity import code_digest
from precache_workers.user_code.loading import load_object


@dataclass(frozen=True)
class SourceKind:
    """A kind of source.

    Attributes
    ----------
    open
        Opens a source without listing it.
    suffixes, schemes
        Suffixes and schemes of its URIs without queries, such as ``.tar`` and ``python``.
    columns
        True if `SourceSpec.columns` may name columns.
    sample_names
        True if `SourceSpec.sample_name` may be a part of a name: up to a dot.
    """

    open: Callable[[SourceSpec], Source]
    suffixes: tuple[str, ...] = ()
    schemes: tuple[str, ...] = ()
    columns: bool = True
    sample_names: bool = False

    def fits(self, uri: str) -> bool:
        """Return True if a URI has a scheme or suffix of this kind."""
        named = any(uri.startswith(f"{scheme}:") for scheme in self.schemes)
        return named or shown(uri).lower().rstrip("/").endswith(self.suffixes or ("\0",))


def _open_dataset(spec: SourceSpec) -> Source:
    factory = spec.uri.removeprefix("python:")
    load_object(factory)
    return DatasetSource(factory, code_digest(factory), rules=spec.rules)


def _open_manifest(spec: SourceSpec) -> Source:
    suffixes = (*manifests.TABLE_SUFFIXES, ".parquet")
    return manifests.ManifestSource(Containers.named(spec, suffixes), spec)


def open_containers(spec: SourceSpec, format_: Format) -> ContainerSource:
    """Open a source whose samples lie in containers."""
    return ContainerSource(Containers.named(spec, format_.suffixes), spec, format_)


def _open_arrow(spec: SourceSpec) -> Source:
    source = open_containers(spec, ArrowFormat(spec.columns))
    if KINDS["arrow"].fits(spec.uri):
        return source
    folder = spec.folder(spec.uri)
    names = saved_files(folder)
    if not names:
        return source
    saved = replace(source.containers, folder=folder, names=names)
    return replace(source, containers=saved)


def _open_arrays(spec: SourceSpec) -> Source:
    format_ = NumpyFormat(spec.columns)
    source = open_containers(spec, format_)
    files = ArrayFiles(
        **vars(source.containers), columns=format_.names, are_parts=spec.kind is not None
    )
    return replace(source, containers=files)


def _open_lmdb(spec: SourceSpec) -> Source:
    # A database is a file, or a folder that contains data.mdb.
    inside = Path(spec.uri, "data.mdb")
    uri = str(inside) if local_path(inside).is_file() else spec.uri
    return open_containers(replace(spec, uri=uri), LMDBFormat())


def _containers(format_: Any, *options: str) -> SourceKind:
    """Return the kind of containers of a format, which is made from options of a `SourceSpec`."""

    def open_one(spec: SourceSpec) -> Source:
        return open_containers(spec, format_(*(getattr(spec, name) for name in options)))

    return SourceKind(
        open_one,
        format_.suffixes,
        columns="columns" in options,
        sample_names="sample_name" in options,
    )


KINDS: dict[str, SourceKind] = {
    "folder": SourceKind(lambda spec: FolderSource(spec.folder(spec.uri), spec), columns=False),
    "folders": SourceKind(open_paired, columns=False),
    "python": SourceKind(_open_dataset, schemes=("python",), columns=False),
    "tar": _containers(TarFormat, "sample_name", "inputs"),
    "parquet": _containers(ParquetFormat, "columns"),
    "arrow": SourceKind(_open_arrow, ArrowFormat.suffixes),
    "npy": SourceKind(_open_arrays, NumpyFormat.suffixes),
    "tfrecord": _containers(TFRecordFormat, "columns"),
    "lmdb": SourceKind(_open_lmdb, LMDBFormat.suffixes, columns=False),
    "zip": _containers(ZipFormat),
    "manifest": SourceKind(_open_manifest, manifests.TABLE_SUFFIXES),
}


def open_source(source: str, storage_options: StorageOptions = None, **options: Any) -> Source:
    """Open the source that a path, a URL, a pattern or ``python:module:factory`` names.

    Parameters
    ----------
    **options
        Others of `SourceSpec`.

    Raises
    ------
    UsageError
        The kind is unknown or has no columns, or the pattern is malformed.
    SourceError
        The kind cannot be read.
    """
    spec = SourceSpec(source, storage_options, **options)
    chosen, sample_name = _kind_of(spec), spec.sample_name
    if spec.rules.level is not None and chosen is KINDS["python"]:
        raise UsageError(f"{shown(source)} has no folders; leave out --label-level")
    if replace(spec.columns, inputs=IMAGES_ALONE) != NO_COLUMNS and not chosen.columns:
        raise UsageError(
            f"the source {shown(source)} is of a kind without columns; leave out --image-column, "
            "--label-column and --key-column, or give another --source-kind"
        )
    if sample_name not in (None, "whole") and not chosen.sample_names:
        raise UsageError(
            f"the source {shown(source)} is no tar archive, and --sample-name {sample_name} is for "
            "these; leave it out, or give --source-kind tar"
        )
    return chosen.open(spec)


def has_columns(source: str, storage_options: StorageOptions, kind: str | None) -> bool:
    """Return whether a source is a table, whose columns may be chosen."""
    return _kind_of(SourceSpec(source, storage_options, kind=kind)).columns


def kind_of_name(name: str) -> str:
    """Return the kind with the scheme or suffix of a name; empty if there is none."""
    return next((kind for kind, value in KINDS.items() if value.fits(name)), "")


def _kind_of(spec: SourceSpec) -> SourceKind:
    source, name = spec.uri, spec.kind
    if name is not None:
        if name in KINDS:
            return KINDS[name]
        raise UsageError(f"there is no source kind {name!r}; choose one of {', '.join(KINDS)}")
    if "://" not in source and os.path.isdir(local_path(source)):  # noqa: PTH112 - no error
        folder = local_path(source)
        if (folder / "data.mdb").is_file():
            return KINDS["lmdb"]
        return KINDS["arrow" if is_saved_dataset(folder) else "folder"]  # despite any suffix
    own = kind_of_name(source)
    if own:
        return KINDS[own]
    if "{" in source:
        return KINDS["folders"]
    file = shown(source)
    if container_noun(file) and open_folder(source, spec.storage_options).kind() == "file":
        raise SourceError(f"the source {file} is {unread_container(file)}")
    return KINDS["folder"]
