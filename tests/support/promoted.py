"""A table or view with columns of two models, complete and indexed, of which one takes the place of the other."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from airflow_geneva import connect, expect, udf
from airflow_geneva.engine.run import promotion
from airflow_geneva.table import Table
from airflow_geneva.view import View

VECTOR = pa.list_(pa.float32(), 2)
calls: list[tuple[str, int]] = []


@udf(data_type=VECTOR, version="1")
def embed_v1(x: int) -> list[float]:
    calls.append(("embed_v1", x))
    return [1.0, float(x)]


@udf(data_type=VECTOR, version="2", expect=[expect.not_null()])
def embed_v2(x: int) -> list[float] | None:
    calls.append(("embed_v2", x))
    return [2.0, float(x)] if x >= 0 else None


def two_models(table: Table) -> Table:
    table.add_columns({"embedding": embed_v1, "embedding_v2": embed_v2})
    for name in ("embedding", "embedding_v2"):
        table.backfill(name, runner="inline")
    return indexed(table)


def view_of_two_models(table: Table, **more: Any) -> View:
    """A view of all rows; `more` are further columns of its query."""
    columns = {"id": "id", "embedding": (embed_v1, ["x"]), "embedding_v2": (embed_v2, ["x"]), **more}
    view = table.query().select(columns).create_materialized_view(connect(table.location.database_uri), "near")
    view.refresh(runner="inline")
    return indexed(view)


def indexed(live: Any) -> Any:
    for name in ("embedding", "embedding_v2"):
        live.lance.create_index(name, "IVF_FLAT", num_partitions=1)
    return live


def promote(live: Table | View, **options: Any) -> promotion.Promoting:
    return live.promote_column("embedding_v2", to="embedding", keep_as="embedding_v1", **options)


def back(live: Table | View) -> promotion.Promoting:
    return live.promote_column("embedding_v1", to="embedding", keep_as="embedding_v2")


def models(live: Table | View, column: str = "embedding") -> set[float | None]:
    return {None if value is None else value[0] for value in live.to_arrow([column])[column].to_pylist()}
