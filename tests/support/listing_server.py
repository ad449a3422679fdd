"""Servers of names alone, which answer listings page by page as S3 and Azure do; nothing there can
be read.
"""

import base64
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qsl, quote_plus, urlsplit
from xml.sax.saxutils import escape

import xxhash

from tests.support.servers import Handler, HTTPServer

PAGE = 1000
"""Names in a page, as with S3."""

AZURES_PAGE = 5000
"""And with Azure."""


class ListingServer(HTTPServer):
    """A bucket of some names, in order; a page of a prefix takes `latency` seconds.

    Attributes
    ----------
    pages
        How many were asked for.
    starts
        Whether a listing begins where it is to, as not every service has it.
    """

    def __init__(self, names: Sequence[str], page: int = PAGE, latency: float = 0.0) -> None:
        self.names, self.page, self.latency = names, page, latency
        self.pages = 0
        self.starts = True
        super().__init__(_Handler)

    def options(self, port: int | None = None) -> dict[str, Any]:
        """Storage options, through a proxy's port or straight."""
        return {
            "key": "someone",
            "secret": "something",
            "endpoint_url": f"http://127.0.0.1:{port or self.port}",
            "client_kwargs": {"region_name": "us-east-1"},
        }

    def answer(self, prefix: str, delimiter: str, after: str, encoding: str) -> str:
        """The XML of a page, of the names behind `after`."""
        names, token = self.listed(prefix, delimiter, after)
        quoted = _quoted if encoding == "url" else escape
        found = [f"<EncodingType>{encoding}</EncodingType>"] if encoding else []
        for name in names:
            if delimiter and name.endswith(delimiter) and name != prefix:
                found.append(f"<CommonPrefixes><Prefix>{quoted(name)}</Prefix></CommonPrefixes>")
            else:
                found.append(_contents(name, quoted(name)))
        if token:
            more = f"<NextContinuationToken>{_token(token)}</NextContinuationToken>"
            found.append(f"<IsTruncated>true</IsTruncated>{more}")
        kind = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
        return f"<ListBucketResult {kind}>{''.join(found)}</ListBucketResult>"

    def listed(self, prefix: str, delimiter: str, after: str) -> tuple[list[str], str]:
        """A page of the names behind `after`, and behind which the next one begins; or none."""
        with self.lock:
            self.pages += 1
        time.sleep(self.latency)
        found = list[str]()
        at, last = max(bisect_left(self.names, prefix), bisect_right(self.names, after)), ""
        while at < len(self.names) and self.names[at].startswith(prefix):
            if len(found) == self.page:
                return found, last
            name = self.names[at]
            cut = name.find(delimiter, len(prefix)) if delimiter else -1
            if cut < 0:
                last, at = name, at + 1
                found.append(name)
            else:  # all below the folder: no name lies between them and what follows "/"
                found.append(name[: cut + 1])
                last = found[-1] + "\U0010ffff"
                at = bisect_left(self.names, last)
        return found, ""


class AzureListingServer(ListingServer):
    """The same as a container of Azure's.

    Source: https://learn.microsoft.com/rest/api/storageservices/list-blobs
    """

    def __init__(self, names: Sequence[str], page: int = AZURES_PAGE, latency: float = 0.0) -> None:
        super().__init__(names, page, latency)

    def options(self, port: int | None = None) -> dict[str, Any]:
        endpoint = f"http://127.0.0.1:{port or self.port}/account"
        parts = {"AccountName": "account", "AccountKey": "a2V5", "BlobEndpoint": endpoint}
        return {"connection_string": ";".join(f"{n}={value}" for n, value in parts.items())}

    def answer(self, prefix: str, delimiter: str, after: str, encoding: str) -> str:
        names, token = self.listed(prefix, delimiter, after)
        found = [
            f"<BlobPrefix><Name>{escape(name)}</Name></BlobPrefix>"
            if delimiter and name.endswith(delimiter) and name != prefix
            else _blob(name)
            for name in names
        ]
        return (
            '<EnumerationResults ServiceEndpoint="http://127.0.0.1/" ContainerName="bucket">'
            f"<Blobs>{''.join(found)}</Blobs><NextMarker>{_token(token)}</NextMarker></EnumerationResults>"
        )


def _token(name: str) -> str:
    """Opaque, as the services' are."""
    return base64.b64encode(name.encode()).decode()


def _contents(name: str, quoted: str) -> str:
    digest = xxhash.xxh3_128_hexdigest(name.encode())
    return (
        f"<Contents><Key>{quoted}</Key><LastModified>2024-05-17T08:30:00.000Z</LastModified>"
        f"<ETag>&quot;{digest}&quot;</ETag><ChecksumAlgorithm>CRC64NVME</ChecksumAlgorithm>"
        f"<ChecksumType>FULL_OBJECT</ChecksumType><Size>{100_000 + len(name)}</Size>"
        "<StorageClass>STANDARD</StorageClass></Contents>"
    )


def _blob(name: str) -> str:
    digest = xxhash.xxh3_128_hexdigest(name.encode())
    time = "Fri, 17 May 2024 08:30:00 GMT"
    return (
        f"<Blob><Name>{escape(name)}</Name><Properties><Creation-Time>{time}</Creation-Time>"
        f"<Last-Modified>{time}</Last-Modified><Etag>0x{digest[:16].upper()}</Etag>"
        f"<Content-Length>{100_000 + len(name)}</Content-Length>"
        "<Content-Type>image/jpeg</Content-Type><Content-Encoding /><Content-Language />"
        "<Content-CRC64 /><Content-MD5>a2V5IGtleSBrZXkga2V5IA==</Content-MD5><Cache-Control />"
        "<Content-Disposition /><BlobType>BlockBlob</BlobType><AccessTier>Hot</AccessTier>"
        "<AccessTierInferred>true</AccessTierInferred><LeaseStatus>unlocked</LeaseStatus>"
        "<LeaseState>available</LeaseState><ServerEncrypted>true</ServerEncrypted></Properties>"
        "<Metadata /><OrMetadata /></Blob>"
    )


def _quoted(name: str) -> str:
    return escape(quote_plus(name, "/"))


class _Handler(Handler):
    server: ListingServer

    def do_GET(self) -> None:
        query = dict(parse_qsl(urlsplit(self.path).query))
        token = query.get("continuation-token") or query.get("marker", "")
        after = base64.b64decode(token).decode()
        if self.server.starts:
            after = after or query.get("start-after", "")
        given = (query.get(name, "") for name in ("prefix", "delimiter"))
        data = self.server.answer(*given, after, query.get("encoding-type", ""))
        self.send(200, data.encode(), XML)

    def do_HEAD(self) -> None:
        bucket = "/" not in urlsplit(self.path).path.strip("/")
        self.send(200 if bucket else 404, b"", XML)


XML = {"Content-Type": "application/xml"}
