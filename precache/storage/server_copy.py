"""Copies that a service makes by itself and that replace nothing.

fsspec's libraries copy over whatever exists, so this asks the services by the libraries' public
ways to send a request. Of S3, only the end of an upload in parts is asked to create: servers that
honour ``If-None-Match`` there and at a put may ignore it at a copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any


def _create_on_s3(fs: Any, source: str, target: str) -> None:
    """One part, of 5 GiB at most."""
    names = "Bucket", "Key"
    place = dict(zip(names, fs.split_path(target), strict=False))
    origin = dict(zip(names, fs.split_path(source), strict=False))
    upload = {**place, "UploadId": fs.call_s3("create_multipart_upload", **place)["UploadId"]}
    try:
        part = fs.call_s3("upload_part_copy", CopySource=origin, PartNumber=1, **upload)
        parts = {"Parts": [{"PartNumber": 1, "ETag": part["CopyPartResult"]["ETag"]}]}
        fs.call_s3("complete_multipart_upload", MultipartUpload=parts, IfNoneMatch="*", **upload)
    except BaseException:
        with contextlib.suppress(Exception):  # the service ends it by the bucket's own rules
            fs.call_s3("abort_multipart_upload", **upload)
        raise


def _create_on_gcs(fs: Any, source: str, target: str) -> None:
    path = "b/{}/o/{}/rewriteTo/b/{}/o/{}"
    names = *fs.split_path(source)[:2], *fs.split_path(target)[:2]
    token, done = None, False
    while not done:  # a large object takes several requests
        answer = fs.call(
            "POST", path, *names, ifGenerationMatch=0, rewriteToken=token, json_out=True
        )
        token, done = answer.get("rewriteToken"), answer["done"]


def _create_on_azure(fs: Any, source: str, target: str) -> None:
    from azure.core import MatchConditions
    from azure.core.exceptions import ResourceExistsError
    from fsspec.asyn import sync

    def blob(path: str) -> Any:
        container, name, _ = fs.split_path(path)
        return fs.service_client.get_blob_client(container, name)

    async def copy() -> None:
        missing = MatchConditions.IfMissing
        await blob(target).start_copy_from_url(blob(source).url, match_condition=missing)

    try:
        sync(fs.loop, copy)
    except ResourceExistsError:
        raise FileExistsError(target) from None


def _create_by_way_of_here(fs: Any, source: str, target: str) -> None:
    fs.pipe_file(target, fs.cat_file(source), mode="create")


_WAYS: Mapping[str, Callable[[Any, str, str], None]] = {
    "s3": _create_on_s3,
    "gcs": _create_on_gcs,
    "azure": _create_on_azure,
}


def create_copy(kind: str | None, fs: Any, source: str, target: str) -> None:
    """Copy an object within a file system to a path where nothing may exist.

    Parameters
    ----------
    kind
        The extra of precache that installs its library (`filesystems.EXTRAS`); None for another.

    Raises
    ------
    FileExistsError
        Something exists; some libraries raise an error of their own, with status 412.
    """
    _WAYS.get(kind or "", _create_by_way_of_here)(fs, source, target)
