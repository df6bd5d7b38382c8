"""Attacks by a user with write access to the folder of a table, and to nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from airflow_geneva import Database, Table, connect
from airflow_geneva.engine.run.record import record_plan
from airflow_geneva.engine.udf.definition import UDF_KEY
from airflow_geneva.engine.views.definition import QUERY_KEY
from tests.udfs_for_tests import views as udfs

MARK = "belongs-to-somebody-else"
"""A secret in every document outside of the tables."""
DEEP = "[" * 100_000 + "]" * 100_000
ROWS = 20


def edit_definition(view: Table, **changes: Any) -> None:
    """Change the stored definition of a view."""
    found = json.loads(view.lance.schema.metadata[QUERY_KEY.encode()])
    write_definition(view, json.dumps({**found, **changes}))


def write_definition(view: Table, text: str) -> None:
    view.lance.update_schema_metadata({QUERY_KEY: text})


class Site:
    """A database with a table and a view, whose documents are damaged on purpose, and its neighboring files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uri, self._kept, self.outside = root / "db", root / "kept", root / "outside"
        table = self.database.create_table("docs", pa.table({"x": list(range(ROWS))}), max_rows_per_file=10)
        table.add_columns({"p": udfs.plus, "k": (udfs.picky, ["x"])})
        sizes: dict[str, Any] = {"checkpoint_interval": 0.0, "checkpoint_size": 5, "shard_size": 1}
        table.backfill("p", runner="inline", where="x < 15", **sizes)
        table.backfill("k", runner="inline", **sizes)
        view = table.query().select(["x"]).add_columns({"e": (udfs.picky, ["x"])}).create_materialized_view(name="v")
        view.refresh(runner="inline", **sizes)
        table.add(pa.table({"x": [100, 101]}))
        record_plan(table.plan_backfill("p", **sizes), table.location, store_code=True)
        record_plan(view.plan_refresh(**sizes), view.location, store_code=True)
        self.outside.mkdir()
        secret = Path(self.outside, "job.json")
        shutil.copy(next(Path(table.uri, "_checkpoints", "jobs").glob("*/job.json")), secret)
        secret.write_text(json.dumps({**json.loads(secret.read_text()), "udf": MARK, "error": MARK, "where": MARK}))
        shutil.copytree(self.uri, self._kept, symlinks=True)
        self.documents = sorted(
            str(path.relative_to(self.uri))
            for path in self.uri.rglob("*")
            if path.is_file() and "_checkpoints" in path.parts
        )
        self.folders = sorted({str(Path(name).parent) for name in self.documents})
        self.before = self.look_outside()

    @property
    def database(self) -> Database:
        return connect(self.uri)

    def restore(self) -> None:
        shutil.rmtree(self.uri)
        shutil.copytree(self._kept, self.uri, symlinks=True)

    def look_outside(self) -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in sorted(self.outside.rglob("*")) if path.is_file()}

    def read(self, name: str) -> Any:
        """Return the values of a JSON document; None for another kind of document."""
        try:
            return json.loads((self.uri / name).read_bytes())
        except ValueError:
            return None

    @contextmanager
    def damaged(self, damage: Damage) -> Iterator[None]:
        damage.do(self)
        try:
            yield
            assert self.look_outside() == self.before
        finally:
            self.restore()


VALUES: list[Any] = [
    *(None, True, -1, 0, 7, 10**30, -(2**63), 1e300, -1e300, 1e17, 0.5, "", "text", "\ud800", "\x1b[2J\x00\x07"),
    *("../../outside", "../outside/job", "/etc/passwd", "a" * 10_000, "<script>alert(1)</script>", "2026-01-01"),
    *("pyspark.shell:spark", "this:s", [], {}, [[]], [None], {"a": None}, [[1, 2], [3]], {"": {"": []}}),
    list(range(50)),
]
TEXTS = [
    *(b"", b"{", b"null", b"[]", b"{}", b"0", b'""', b"\xff\xfe\x00", b"NaN", b'{"at":NaN,"started":Infinity}'),
    *(DEEP.encode(), (DEEP[:500] + DEEP[-500:]).encode(), b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    *(b"\x00" * 1000, b"9" * 100_000),
]


class Damage:
    """One change of one document: of its content, or of its kind."""

    def __init__(self, kind: str, name: str, value: Any = None, place: tuple[Any, ...] = ()) -> None:
        self.kind, self.name, self.value, self.place = kind, name, value, place

    def __repr__(self) -> str:
        return f"{self.kind} {self.name} {self.place}: {self.value!r:.200}"

    def do(self, site: Site) -> None:
        if self.kind == "definition":
            write_definition(site.database.open_table("v"), self.value)
            return
        if self.kind == "column":
            site.database.open_table("docs").lance.update_field_metadata({"p": {UDF_KEY: self.value}})
            return
        path = site.uri / self.name
        if self.kind == "link":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            path.symlink_to(site.outside if self.value == "folder" else site.outside / "job.json")
        elif self.kind == "swap":
            path.write_bytes((site.uri / self.value).read_bytes())
        else:
            path.write_bytes(self.value)


def damages(site: Site) -> st.SearchStrategy[Damage]:
    """Draw a change: replace a value of any document, or the entire document, by any value, or by a link."""
    definition = json.loads(site.database.open_table("v").lance.schema.metadata[QUERY_KEY.encode()])
    field = site.database.open_table("docs").lance.schema.field("p")
    column = json.loads(field.metadata[UDF_KEY.encode()])
    texts = st.sampled_from([text for text in TEXTS if b"\x00" not in text and b"\xff" not in text])

    def edited(kind: str, name: str, document: Any) -> st.SearchStrategy[Damage]:
        places = list(_places(document))
        return st.builds(
            lambda place, value: Damage(kind, name, _text(_with(document, place, value), kind), place),
            st.sampled_from(places),
            st.sampled_from(VALUES),
        )

    def of_document(name: str) -> st.SearchStrategy[Damage]:
        whole = st.one_of(st.sampled_from(TEXTS), st.binary(max_size=200)).map(lambda text: Damage("bytes", name, text))
        linked = st.sampled_from(["folder", "file"]).map(lambda value: Damage("link", name, value))
        swapped = st.sampled_from(site.documents).map(lambda other: Damage("swap", name, other))
        document = site.read(name)
        if not isinstance(document, (dict, list)):
            return st.one_of(whole, linked, swapped)
        return st.one_of(edited("bytes", name, document), edited("bytes", name, document), whole, linked, swapped)

    def of_metadata(kind: str, document: Any) -> st.SearchStrategy[Damage]:
        return st.one_of(edited(kind, "", document), texts.map(lambda text: Damage(kind, "", text.decode())))

    folders = st.sampled_from(site.folders).map(lambda name: Damage("link", name, "folder"))
    by_kind: dict[str, list[str]] = {}
    for name in site.documents:
        by_kind.setdefault(_kind_of(name), []).append(name)
    documents = [st.sampled_from(names).flatmap(of_document) for names in by_kind.values()]
    # As often as a document, because it is read first, and by most readers.
    often = [of_metadata("definition", definition), of_metadata("column", column), folders]
    return st.sampled_from([*often * (len(documents) // 4), *documents]).flatmap(lambda chosen: chosen)


def _kind_of(name: str) -> str:
    """Two documents are of one kind if their names differ in numbers and hashes only."""
    table, *rest = name.split("/")
    return f"{table}/{'/'.join(rest[:2])[:30]}/{rest[-1].partition('-')[0]}"


def _places(document: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in items:
        yield from _places(value, (*at, key))


def _with(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    copied = dict(document) if isinstance(document, dict) else list(document)
    copied[place[0]] = _with(document[place[0]], place[1:], value)
    return copied


def _text(document: Any, kind: str) -> Any:
    text = json.dumps(document)
    return text if kind in ("definition", "column") else text.encode()
