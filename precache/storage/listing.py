"""What lies directly below a prefix, page by page: a million names are never held at once."""

from __future__ import annotations

from collections.abc import Mapping
from os.path import commonprefix
from typing import Any, NamedTuple
from urllib.parse import unquote_plus
from xml.etree import ElementTree as ET

from precache.storage.backends import EXTRAS
from precache.storage.s3_reads import reads_of

GOOGLES_PAGE = 5000
"""Objects that Google gives in a page at most."""

GOOGLES_FIELDS = "nextPageToken,prefixes,items(name,size,updated,generation)"
"""Of some twenty that it knows of an object."""

AZURES_PAGE = 5000
"""Blobs and folders that Azure gives in a page at most."""

Entry = dict[str, Any]
"""One thing below a prefix, with keys as fsspec has them: type, size and what else; its name begins
behind the prefix, and has no slash."""


class Page(NamedTuple):
    """Some entries, and what to ask for the next ones with; None where there are no more."""

    entries: list[Entry]
    token: str | None


class KeyRange(NamedTuple):
    """What is still to be listed directly below a prefix: names from one to another.

    Attributes
    ----------
    prefix
        Below the folder that is walked; empty, or with a slash behind it.
    after, end
        Names in it, the former exclusive, the latter inclusive, None for the last one; those of
        folders end in ``/``.
    token, seen
        Of the page before, and the last name in it; None and empty where there was none.
    """

    prefix: str
    after: str = ""
    end: str | None = None
    token: str | None = None
    seen: str = ""

    def holds(self, name: str) -> bool:
        """Whether a name lies between its ends."""
        return self.after < name and (self.end is None or name <= self.end)

    def split(self) -> list[KeyRange]:
        """The same in two, to be listed at a time, if it is more than a page."""
        middle = between(self.seen, self.end) if self.token else None
        if middle is None:
            return [self]
        return [self._replace(end=middle), KeyRange(self.prefix, middle, self.end)]


_LOWEST, _BASE, _DIGITS = 32, 96, 4
"""Names count as fractions whose digits are printable ASCII; as many as differ matter, and some."""


def between(low: str, high: str | None) -> str | None:
    """A name about half-way between two, without a ``/``; None where none is found.

    So all below one folder is on one side of it. Services order names by their bytes in UTF-8, as
    Python does strings.
    """
    count = len(commonprefix((low, high or ""))) + _DIGITS  # noqa: RUF071 - no paths
    last = _BASE**count - 1 if high is None else _fraction(high, count)
    middle = (_fraction(low, count) + last) // 2
    digits = [middle // _BASE**place % _BASE for place in reversed(range(count))]
    name = "".join(chr(_LOWEST + digit) for digit in digits).replace("/", "0")
    return name if low < name and (high is None or name < high) else None


def _fraction(name: str, count: int) -> int:
    """Of the first digits, those that are missing zeros; beyond ASCII, all is the last digit."""
    value = 0
    for letter in name[:count].ljust(count, chr(_LOWEST)):
        value = value * _BASE + min(max(ord(letter) - _LOWEST, 0), _BASE - 1)
    return value


def stripped(fs: Any, path: str) -> str:
    """A folder's path, as it begins the names that the file system gives."""
    # Of a name that ends in ? or #, adlfs would take that off, were no slash behind it.
    own: str = fs._strip_protocol(f"{path}/")
    return own.rstrip("/")


def splits(protocol: str, fs: Any, path: str) -> bool:
    """Whether a listing of a path can begin anywhere, and comes in order."""
    kind, bucket = EXTRAS.get(protocol), fs._strip_protocol(path).partition("/")[0]
    return kind == "gcs" or (kind == "s3" and not bucket.endswith("--x-s3"))  # directory buckets


def page_of(
    kind: str, fs: Any, options: Mapping[str, Any], root: str, span: KeyRange, *, fast: bool
) -> Page:
    """A page of what lies directly below a prefix, and of the prefix itself where it is an object.

    Keys may have empty parts: no slash is added to them or taken away.

    Parameters
    ----------
    kind
        ``gcs``, ``s3`` or ``azure``.
    root, span
        The folder that is walked, and where in it to begin; the page may go beyond either end.
    fast
        Whether S3 is asked past s3fs, which takes twenty times the CPU time to read an answer.
    """
    bucket, _, key = stripped(fs, root).partition("/")
    prefix = f"{key}/{span.prefix}" if key else span.prefix
    if kind == "azure":
        return _page_of_azure(fs, bucket, prefix, span.token)
    start = f"{prefix}{span.after}" if span.after and not span.token else None
    if kind == "gcs":
        return _page_of_google(fs, bucket, prefix, start, span.token)
    wanted = {"Bucket": bucket, "Prefix": prefix, "Delimiter": "/"}
    reads = reads_of(fs, options) if fast else None
    answer = reads.page(bucket, prefix, start, span.token) if reads else None
    if answer is not None:
        return _page_of_s3(prefix, answer)
    places = {"StartAfter": start, "ContinuationToken": span.token}
    more = {name: value for name, value in places.items() if value}
    found = fs.call_s3("list_objects_v2", **wanted, **more, **fs.req_kw)
    folders = [_folder(prefix, each["Prefix"]) for each in found.get("CommonPrefixes", ())]
    files = [
        {**each, "name": each["Key"].removeprefix(prefix), "type": "file", "size": each["Size"]}
        for each in found.get("Contents", ())
    ]
    return Page(folders + files, found.get("NextContinuationToken"))


def _page_of_google(
    fs: Any, bucket: str, prefix: str, start: str | None, token: str | None
) -> Page:
    wanted = {"delimiter": "/", "maxResults": GOOGLES_PAGE, "fields": GOOGLES_FIELDS}
    places = {"prefix": prefix, "startOffset": start, "pageToken": token}
    given = {name: value for name, value in places.items() if value}
    found = fs.call("GET", "b/{}/o", bucket, **wanted, **given, json_out=True)
    folders = [_folder(prefix, name) for name in found.get("prefixes", ())]
    files = [
        {
            **each,
            "name": each["name"].removeprefix(prefix),
            "type": "file",
            "size": int(each["size"]),
        }
        for each in found.get("items", ())
    ]
    return Page(folders + files, found.get("nextPageToken"))


def _page_of_azure(fs: Any, bucket: str, prefix: str, token: str | None) -> Page:
    """By Azure's own library: adlfs lists all at once, and what begins alike besides."""
    from fsspec.asyn import sync

    async def ask() -> Page:
        async with fs.service_client.get_container_client(bucket) as container:
            found = container.walk_blobs(
                name_starts_with=prefix, include=["metadata"], results_per_page=AZURES_PAGE
            )
            pages = found.by_page(token)
            listed = [each async for each in await anext(pages)]
        entries = [_entry_of_azure(prefix, each) for each in listed]
        return Page([each for each in entries if each], pages.continuation_token)

    page: Page = sync(fs.loop, ask)
    return page


def _entry_of_azure(prefix: str, listed: Any) -> Entry | None:
    """None of a blob that marks a folder: what lies in that is listed as a folder besides."""
    if not listed.has_key("size"):
        return _folder(prefix, listed.name)
    marks = listed.metadata or {}
    hierarchical = "true" in (marks.get("hdi_isfolder"), marks.get("Hdi_isfolder"))
    told = marks.get("is_directory")
    if told == "true" or (hierarchical and told != "false"):
        return None
    known = {"last_modified": listed.last_modified, "etag": listed.etag}
    name = listed.name.removeprefix(prefix)
    return {"name": name, "type": "file", "size": listed.size, **known}


def _page_of_s3(prefix: str, answer: bytes) -> Page:
    """From the answer to ListObjectsV2."""
    try:
        return _parsed(prefix, ET.fromstring(answer))
    except (ET.ParseError, ValueError):
        raise ConnectionError("the listing breaks off, or is none") from None


def _parsed(prefix: str, answer: ET.Element) -> Page:
    space = answer.tag.removesuffix("ListBucketResult")  # which not every service names
    key, size, time, etag = (f"{space}{name}" for name in ("Key", "Size", "LastModified", "ETag"))
    plain = unquote_plus if answer.findtext(f"{space}EncodingType") == "url" else str
    folders = [
        _folder(prefix, plain(each.findtext(f"{space}Prefix", "")))
        for each in answer.iterfind(f"{space}CommonPrefixes")
    ]
    files = [
        {
            "name": plain(each.findtext(key, "")).removeprefix(prefix),
            "type": "file",
            "size": int(each.findtext(size, "")),
            "LastModified": each.findtext(time),
            "ETag": each.findtext(etag),
        }
        for each in answer.iterfind(f"{space}Contents")
    ]
    return Page(folders + files, answer.findtext(f"{space}NextContinuationToken"))


def _folder(prefix: str, name: str) -> Entry:
    return {"name": name.removeprefix(prefix)[:-1], "type": "directory", "size": 0}
