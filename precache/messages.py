"""Text as people may see it: control characters escaped, nothing secret of a URL.

File names, class names, reasons and the answers of servers are written by others. A terminal obeys
the control characters in them, a newline forges a line, and an override of the writing direction
hides how a name ends. Whatever did not come from the program's own source therefore goes through
`printable` before it is shown. Errors do so when they are raised (`precache.errors`), lines and
tables when they are printed (`precache.runtime.terminal`).
"""

from __future__ import annotations

import os
import re

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0, DEL and C1, line and paragraph separators, overrides of direction, undecodable bytes."""

_WITH_PORTS = frozenset(("http", "https", "ray"))
"""Schemes with a host, which may have a port; those of object stores have a bucket."""

_PORT = re.compile(r"[^@:]*:\d*|\[[^\]@]*\](?::\d*)?")

_URL = re.compile(r"(?<![\w+.-])[A-Za-z][\w+.-]*://[^\s'\"<>]*[^\s'\"<>.,;:)\]]")
"""Within other text, without the punctuation behind it."""

_PARAMETER = re.compile(
    r"\b(sig|AccountKey|X-Amz-Signature|X-Amz-Security-Token|X-Goog-Signature)=[^\s&;'\"<>]{16,}",
    re.IGNORECASE,
)
"""Keys and signatures that libraries quote without the URL that they are of."""


def printable(text: str) -> str:
    r"""The text on one line: control characters as ``\x1b``, ``\n``, ``\u202e``."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def indented(text: str) -> str:
    """Text of several lines, such as a traceback, of which only the first begins a line."""
    return "\n    ".join(map(printable, text.rstrip("\n").split("\n")))


def shown(uri: str | os.PathLike[str]) -> str:
    """A path or URL without user, password, query and fragment, any of which may be a secret.

    Object stores have no fragments, and keys with ``#`` in them.
    """
    scheme, mark, rest = os.fspath(uri).partition("://")
    if not mark:
        return scheme
    rest = rest[len(_user(scheme, rest)) :]
    end = "[?#]" if scheme.lower() in _WITH_PORTS else "[?]"
    return f"{scheme}://{re.split(end, rest, maxsplit=1)[0]}"


def credentials_of(uri: str | os.PathLike[str]) -> str:
    """``user:password`` as they stand in a URL, empty where it has none."""
    scheme, _, rest = os.fspath(uri).partition("://")
    return _user(scheme, rest).removesuffix("@")


def _user(scheme: str, rest: str) -> str:
    """User and password at the beginning of what follows ``scheme://``, with the ``@``.

    Not by urlsplit, which refuses some of what a user may have mistyped, and ends the user at a
    slash, which secret keys have.
    """
    host = re.split("[/?#]", rest, maxsplit=1)[0]
    web = scheme.lower() in _WITH_PORTS
    if "@" in host:
        user = host[: host.rindex("@") + 1]
        # bucket@version, and container@account of Azure's, hold no secret
        return user if web or ":" in user else ""
    place = _PORT.fullmatch(host) if web else host.startswith("arn:")
    if ":" in host and not place:
        return rest[: rest.rfind("@") + 1]
    return ""


def without_secrets(text: str) -> str:
    """Text with each URL in it as `shown` has it."""
    if "://" in text:
        text = _URL.sub(lambda found: shown(found[0]), text)
    return _PARAMETER.sub(r"\1=…", text)
