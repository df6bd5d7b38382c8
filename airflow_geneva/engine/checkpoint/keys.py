"""Build and parse checkpoint keys, which identify the computed work."""

from __future__ import annotations

import re
from dataclasses import dataclass

from airflow_geneva.engine.storage.uri import md5

# "-" is unsafe because every marker of a key ends in one: a name must not look like a marker.
_UNSAFE = re.compile(r"[^A-Za-z0-9_.]")
_SUFFIX = re.compile(
    r"^(?P<prefix>.*)_srcfiles-(?P<srcfiles>[0-9a-f]{32})_frag-(?P<fragment>\d+)"
    r"(?:_range-(?P<start>\d+)-(?P<end>\d+))?$"
)
_NAME_LENGTH = 60


def key_part(name: str) -> str:
    """Make a user-given name safe for a key: readable, short, without separators, and still unique."""
    clean = _UNSAFE.sub("_", name)[:_NAME_LENGTH]
    return clean if clean == name else f"{clean}.{md5(name)[:8]}"


@dataclass(frozen=True)
class WorkIdentity:
    """Identifies a piece of work, apart from its fragments; equal identities share checkpoints."""

    udf: str
    version: str
    column: str
    where: str | None
    uri: str

    @property
    def prefix(self) -> str:
        """The key up to and including the uri part; XCom carries it as the checkpoint prefix."""
        return (
            f"udf-{key_part(self.udf)}_ver-{key_part(self.version)}_col-{key_part(self.column)}"
            f"_where-{md5(self.where or '')}_uri-{md5(self.uri)}"
        )


@dataclass(frozen=True)
class FragmentKey:
    """Identifies one fragment's checkpoints below a prefix."""

    prefix: str
    srcfiles: str
    fragment: int

    def __str__(self) -> str:
        return f"{self.prefix}_srcfiles-{self.srcfiles}_frag-{self.fragment}"

    def range(self, start: int, end: int) -> str:
        """Return the key of the checkpoint of physical offsets ``[start, end)``."""
        return f"{self}_range-{start}-{end}"


@dataclass(frozen=True)
class ParsedKey:
    """A parsed key. Keys are parsed from the right, so names may contain the marker words."""

    fragment: FragmentKey
    range: tuple[int, int] | None


def parse_key(key: str) -> ParsedKey | None:
    """Parse a fragment or range key; None for any other text."""
    if (match := _SUFFIX.match(key)) is None:
        return None
    span = None if match["start"] is None else (int(match["start"]), int(match["end"]))
    return ParsedKey(FragmentKey(match["prefix"], match["srcfiles"], int(match["fragment"])), span)


_FOLDERS = ("_where-", "_srcfiles-", "_frag-", "_range-")


def key_to_path(key: str) -> str:
    """Convert a key to a path with folders, split from the right; names stay short and can be listed by prefix."""
    path, rest = "", key
    for marker in reversed(_FOLDERS):
        head, found, tail = rest.rpartition(marker)
        if found:
            path, rest = f"/{marker[1:]}{tail}{path}", head
    return f"{rest}{path}.lance"


def path_to_key(path: str) -> str:
    """Convert a path from :func:`key_to_path` back to its key."""
    return path.removesuffix(".lance").replace("/", "_")
