"""List the checkpoints of a table."""

from __future__ import annotations

import re
from dataclasses import dataclass

from airflow_geneva.engine.checkpoint.keys import key_part, parse_key, path_to_key
from airflow_geneva.engine.checkpoint.packs import keys_of_pack
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.engine.storage.uri import md5

_PREFIX = re.compile(r"udf-(?P<udf>.*)_ver-(?P<version>.*)_col-(?P<column>.*)_where-(?P<where>\w+)_uri-(?P<uri>\w+)")
_NO_FILTER = md5("")


@dataclass
class CheckpointSummary:
    """The checkpoints below one prefix: one UDF version, one column, one filter, which is a hash; without staged files.

    `newest` is the time of the newest one, in seconds since the epoch.
    """

    prefix: str
    udf: str
    version: str
    column: str
    where: str | None
    fragments: int = 0
    ranges: int = 0
    size_bytes: int = 0
    newest: float = 0.0


def list_checkpoints(checkpoints: Storage, column: str | None = None) -> list[CheckpointSummary]:
    """Count the checkpoints of a table, or of one of its columns, by prefix, newest first."""
    found: dict[str, CheckpointSummary] = {}
    for entry in checkpoints.list_entries():
        if not entry.name.startswith("udf-"):
            continue
        keys = keys_of_pack(checkpoints, entry.name) or [path_to_key(entry.name)]
        for key in map(parse_key, keys):
            parts = _PREFIX.fullmatch(key.fragment.prefix) if key else None
            if key is None or parts is None or (column is not None and parts["column"] != key_part(column)):
                continue
            prefix = key.fragment.prefix
            where = None if parts["where"] == _NO_FILTER else parts["where"]
            group = found.setdefault(
                prefix, CheckpointSummary(prefix, parts["udf"], parts["version"], parts["column"], where)
            )  # fmt: skip
            if key.range is None:
                group.fragments += 1
            else:
                group.ranges += 1
            group.size_bytes += entry.size_bytes // len(keys)
            group.newest = max(group.newest, entry.modified)
    return sorted(found.values(), key=lambda group: -group.newest)
