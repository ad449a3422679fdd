"""Resolve names of containers: a file, a folder, a pattern (``*``, ``**``, ``?``) or braces."""

from __future__ import annotations

import fnmatch
import itertools
import os
import posixpath
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import bracex

from precache.errors import SourceError, UsageError
from precache.messages import shown, url_parts
from precache.runtime.threads import prefetch
from precache.storage.backends import WEB
from precache.storage.base import LINK_AGAIN, LINK_OUT, FileInfo, Folder, left_out_text
from precache.storage.local import local_path
from precache_workers.sources.base import SourceSpec

MOST_NAMES = 100_000
"""Maximum number of names that braces expand to."""

REQUESTS = 16
"""Files that are looked up concurrently on remote storage."""

_MAGIC = re.compile(r"[*?\[]")
_TEXT = r"(?:[^{}\\]|\\.)*"
_GROUP = re.compile(rf"(?<!\\)\{{{_TEXT},{_TEXT}\}}")
"""Braces with several names in them, such as ``{images,masks}``."""


@dataclass(frozen=True)
class Containers:
    """The files of a source, all below one folder.

    Attributes
    ----------
    folder
        The folder that contains all files; keys begin with names relative to it.
    uri
        The URL, absolute path or pattern that names the files, without secrets of a URL.
    suffixes
        Suffixes of the files that are read if the source is a folder.
    names
        The files, if metadata of the source lists them; empty to resolve `uri`.
    """

    folder: Folder
    uri: str
    suffixes: tuple[str, ...]
    names: tuple[str, ...] = ()

    @classmethod
    def named(
        cls,
        spec: SourceSpec,
        suffixes: tuple[str, ...],
    ) -> Containers:
        """Resolve the name of a source, without requests to remote storage.

        Raises
        ------
        UsageError
            Braces are unbalanced or expand to too many names, ``..`` occurs in a URL, or the
            files lie in several buckets.
        """
        uri = spec.uri
        plain, user, query = uri, "", ""
        if "://" not in uri:
            plain = str(local_path(uri).absolute())
        elif uri.partition("://")[0] in WEB:
            plain, (user, _, query) = shown(uri), url_parts(uri)
        root = _resolved(plain)[0].replace("://", f"://{user}", 1) + query
        return cls(spec.folder(root), plain, suffixes)

    def __str__(self) -> str:
        return shown(self.uri)

    def files(self, left_out: Counter[str]) -> list[FileInfo]:
        """Return the files in the order of the patterns; matches of one pattern are sorted.

        Parameters
        ----------
        left_out
            Output: number of matching files that were left out, by reason.

        Raises
        ------
        SourceError
            No file matches, or a named file is missing.
        """
        names: dict[str, None] = {}
        infos: dict[str, FileInfo] = {}
        patterns, magic = (self.names, False) if self.names else _resolved(self.uri)[1:]
        for pattern in patterns:
            if not (magic and _MAGIC.search(pattern)):
                names[pattern] = None
            elif "**" in pattern.split("/"):
                walked = {i.name: i for i in sorted(_walk(self.folder, pattern, (), left_out))}
                infos |= walked
                names |= dict.fromkeys(walked)
            else:
                names |= dict.fromkeys(_matching(self.folder, pattern.split("/")))
        unknown = [name for name in names if name not in infos]
        threads = 1 if self.folder.local("") else REQUESTS
        looked = prefetch(self.folder.info, unknown, threads, 2 * threads)
        infos |= {name: i for name, i in zip(unknown, looked, strict=True) if i is not None}
        missing = [name for name in names if name not in infos]
        literal = set(patterns)
        named = [name for name in missing if name in literal]
        links = [name for name in missing if self._is_link_out(name)]
        if named and named[0] in links:
            raise SourceError(
                f"{self.folder.path(named[0])} is a link that leads out of {self.folder}; give "
                "--follow-links, or the path that it leads to"
            )
        left_out[LINK_OUT] += len(links)
        if len(names) == 1 and named:
            return self._in_folder(named[0], left_out)
        if named:
            more = f", and {len(named) - 1:,} more are missing" if len(named) > 1 else ""
            raise SourceError(f"the source {self} has no {self.folder.path(named[0])}{more}")
        if not infos:
            raise SourceError(
                f"no file fits the source {self}{left_out_text(+left_out)}; correct the path or "
                "the pattern"
            )
        return self._once([infos[name] for name in names if name in infos], left_out)

    def info(self, name: str) -> FileInfo | None:
        """Return a file as `files` does; None if it does not exist."""
        return self.folder.info(name)

    @property
    def patterns(self) -> list[str]:
        """Names and patterns of the files, as the user gave them, below the folder of all."""
        return _resolved(self.uri)[1]

    def narrowed(self, wanted: Collection[str], names: Collection[str]) -> str | None:
        """Return the source of some of the files, by a pattern; None if none has only these.

        Parameters
        ----------
        wanted
            Names of the files that the source has.
        names
            Names of all files of this one.
        """
        if self.names:  # metadata lists those of each folder, too
            return self.folder.path(posixpath.commonpath([n.rpartition("/")[0] for n in wanted]))
        uri = self.folder.path(_pattern(sorted(wanted)))
        endings = tuple(self.suffixes)
        if self.uri.lower().endswith(endings) and not uri.lower().endswith(endings):
            return None  # of another kind
        try:
            root, patterns, magic = _resolved(uri)
        except UsageError:  # the names have braces
            return None
        fitting, above = set(), f"{root.rstrip('/')}/"
        for name in names:
            path = self.folder.path(name)
            if not path.startswith(above):
                continue
            path = path.removeprefix(above)
            if any(_fits(path.split("/"), p.split("/")) if magic else path == p for p in patterns):
                fitting.add(name)
        return uri if fitting == {*wanted} else None

    def _is_link_out(self, name: str) -> bool:
        """Return True for a link that is not followed, as its file is outside of the folder."""
        path = self.folder.local(name)
        return path is not None and path.is_file() and self.folder.info(name) is None

    def _in_folder(self, name: str, left_out: Counter[str]) -> list[FileInfo]:
        """Return the files below a folder; raises if there are none."""
        folder = self.folder.folder(name) if name else self.folder
        if folder.kind() is None:
            raise SourceError(f"the source {self} does not exist; correct the path")
        files = sorted(_walk(folder, "**", self.suffixes, left_out))
        if not files:
            raise SourceError(
                f"the source {self} is a folder without a file that ends in "
                f"{' or '.join(self.suffixes)}{left_out_text(+left_out)}; name the files by a "
                "pattern"
            )
        prefix = f"{name}/" if name else ""
        return self._once([info._replace(name=prefix + info.name) for info in files], left_out)

    def _once(self, files: Sequence[FileInfo], left_out: Counter[str]) -> list[FileInfo]:
        """Leave out links to other ones of the files, and all but one link to the same file."""
        if (root := self.folder.local("")) is None:
            return [*files]
        true_root = os.path.realpath(root)
        places = [os.path.realpath(root / file.name) for file in files]
        taken: dict[str, FileInfo] = {}
        for place, file in zip(places, files, strict=True):
            if place not in taken or place == f"{true_root}/{file.name}":
                taken[place] = file
        once = [file for place, file in zip(places, files, strict=True) if taken[place] is file]
        if links := len(files) - len(once):
            left_out[LINK_AGAIN] += links
        return once


def _resolved(uri: str) -> tuple[str, list[str], bool]:
    """Return the common folder, names or patterns below it, and True if patterns are allowed."""
    protocol, mark, path = uri.partition("://")
    if not mark:
        protocol, path = "", uri
    literal = not mark and os.path.lexists(path)
    paths = [path] if literal else expand_braces(path)
    if mark and any(".." in name.split("/") for name in paths):
        raise UsageError(f"{shown(uri)} has '..', which leads out of its folder; leave it out")
    if not mark:
        paths = [os.path.normpath(name) for name in paths]
    magic = not literal and protocol not in WEB
    split = [_split(name, magic) for name in paths]
    root = _common([folder for folder, _ in split], at_least=1 if mark else 0)
    names = [f"{folder}/{name}"[len(root) :].lstrip("/") for folder, name in split]
    return f"{protocol}{mark}{root or '/'}", names, magic


def _pattern(names: Sequence[str]) -> str:
    """Return a pattern of some sorted names, for parts in which they differ."""
    parts = [name.split("/") for name in names]
    if len({*map(len, parts)}) == 1:
        return "/".join(map(_part, zip(*parts, strict=True)))
    same = common_start(parts)
    ending = _part([path[-1] for path in parts]).rpartition("*")[2]
    return "/".join([*same, "**", f"*{ending}"])


def _part(names: Sequence[str]) -> str:
    """Return a pattern of names, which has no part of a number before its star."""
    if len({*names}) == 1:
        return names[0]
    start = "".join(common_start(names)).rstrip("0123456789")
    end = common_end([name[len(start) :] for name in names]).lstrip("0123456789")
    return f"{start}*{end}"


def common_start(items: Sequence[Sequence[str]]) -> list[str]:
    """Return the letters, or parts of paths, with which all items begin."""
    alike = itertools.takewhile(lambda some: len({*some}) == 1, zip(*items, strict=False))
    return [some[0] for some in alike]


def common_end(texts: Sequence[str]) -> str:
    return "".join(reversed(common_start([text[::-1] for text in texts])))


def expand_braces(text: str) -> list[str]:
    """Expand ``{0000..0099}`` and ``{train,val}`` as a shell does; ``\\{`` is no brace.

    Nor are those of the local folder with which the text begins.

    Raises
    ------
    UsageError
        Braces are unbalanced or malformed, or there are too many names.
    """
    if "{" not in text and "}" not in text:
        return [text]
    outer = text
    while outer and not os.path.lexists(local_path(outer)):
        outer = outer.rpartition("/")[0]
    try:
        inner = text[len(outer) :]
        names = bracex.expand(_escaped(outer) + inner, keep_escapes=True, limit=MOST_NAMES)
    except bracex.ExpansionLimitException:
        raise UsageError(f"{shown(text)} names more than {MOST_NAMES:,} files") from None
    if any(re.search(r"[{}]", re.sub(r"\\.", "", name)) for name in names):
        raise UsageError(
            f"{shown(text)} has a brace without its partner, or with one name; give {{0000..0099}} "
            r"or {one,other}, and \{ and \} for braces in names"
        )
    return [re.sub(r"\\(.)", r"\1", name) for name in names]


def braced(names: Sequence[str]) -> str:
    """Return names in braces, to be expanded by `expand_braces`."""
    return f"{{{','.join(map(_escaped, names))}}}"


def braced_paths(paths: Sequence[str]) -> str:
    """Return paths in braces, but for the parts with which all begin, or end."""
    parts = [path.split("/") for path in paths]
    start = common_start([path[:-1] for path in parts])
    rest = [path[len(start) :] for path in parts]
    end = common_start([path[:0:-1] for path in rest])[::-1]
    names = ["/".join(path[: len(path) - len(end)]) for path in rest]
    return "/".join([*start, braced(names), *end])


def _escaped(name: str) -> str:
    return re.sub(r"([\\{},])", r"\\\1", name)


def around_braces(text: str) -> tuple[str, str] | None:
    """Return the text before and after braces with several names; None if there are none."""
    group = _GROUP.search(text)
    return group and (text[: group.start()], text[group.end() :])


def _split(path: str, magic: bool) -> tuple[str, str]:
    """Split a path into the folder before any pattern, and the rest."""
    match = _MAGIC.search(path) if magic else None
    end = match.start() if match else len(path.rstrip("/"))
    folder, _, _ = path[:end].rpartition("/")
    return folder, path[len(folder) :].strip("/")


def _common(folders: list[str], at_least: int) -> str:
    """Return the common parent; raises unless the first `at_least` parts, the bucket, agree."""
    parts = [folder.split("/") for folder in folders]
    same = common_start(parts)
    if len(same) < at_least:
        raise UsageError("all files of a source must lie in one bucket; name those of one")
    return "/".join(same)


def _matching(folder: Folder, parts: list[str], prefix: str = "") -> Iterator[str]:
    """Yield the names below a folder that match a pattern without ``**``, sorted."""
    first, *rest = parts
    if _MAGIC.search(first):
        names = [name for name in folder.names(prefix.rstrip("/")) if _fits([name], [first])]
    else:
        names = [first]
    for name in names:
        if rest:
            yield from _matching(folder, rest, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}"


def _walk(
    folder: Folder, pattern: str, suffixes: tuple[str, ...], left_out: Counter[str]
) -> Iterator[FileInfo]:
    """Yield the files below a folder that match a pattern with ``**``, and one of the suffixes."""
    parts = pattern.split("/")

    def fits(name: str) -> bool:
        return _fits(name.split("/"), parts) and name.lower().endswith(suffixes or "")

    def leave_out(name: str, reason: str) -> None:
        left_out[reason] += name.endswith("/") or fits(name)

    return (info for info in folder.walk(leave_out) if fits(info.name))


def _fits(names: list[str], parts: list[str]) -> bool:
    """Return True if the parts of a name match those of a pattern; ``**`` matches any number.

    As in a shell, a hidden name matches only a part that begins with a dot.
    """
    if not parts or not names:
        return not names and all(part == "**" for part in parts)
    if names[0].startswith(".") and not parts[0].startswith("."):
        return parts[0] == "**" and _fits(names, parts[1:])
    if parts[0] == "**":
        return _fits(names, parts[1:]) or _fits(names[1:], parts)
    return fnmatch.fnmatchcase(names[0], parts[0]) and _fits(names[1:], parts[1:])
