"""The specification of a load of values by key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_geneva.engine.checkpoint.keys import WorkIdentity
from airflow_geneva.engine.lance_io.fragments import Columns, columns_of, field_ids
from airflow_geneva.engine.lance_io.siblings import Output, is_group
from airflow_geneva.engine.plan.model import ColumnSpec
from airflow_geneva.engine.storage.documents import parse
from airflow_geneva.engine.udf.settings import UdfDefinition

if TYPE_CHECKING:
    import lance


@dataclass(frozen=True, kw_only=True)
class LoadSpec(ColumnSpec):
    """The specification of a job that loads values by key.

    Args:
        source: the files or the table that have the values, as JSON text; no credentials.
        delivery: hash of the source's state and of the options; checkpoints of equal deliveries are shared.
        on: the key columns; they are inputs.
        fact_inputs: the inputs of the UDF whose values the loaded ones count as; () if they count as no UDF's.
        on_missing: ``keep`` or ``null``: what becomes of rows whose key the source lacks.
        on_duplicate: ``error``, ``first`` or ``last``: the row of the source whose values count, if several have a key.
        unchecked: a table of Spark, which the plan could not see: Spark checks it before anything is staged.
    """

    kind: ClassVar[str] = "load"

    source: str
    delivery: str
    on: tuple[str, ...]
    fact_inputs: tuple[str, ...] = ()
    on_missing: str = "keep"
    on_duplicate: str = "error"
    unchecked: bool = False

    @property
    def needs_spark(self) -> str:
        return "a source that only Spark has" if parse(self.source)["format"] == "spark" else ""

    @property
    def udfs(self) -> dict[str, UdfDefinition]:
        return {}

    @property
    def keeps_facts(self) -> bool:
        return bool(self.fact_inputs)

    def fact_columns_at(self, dataset: lance.LanceDataset) -> Columns:
        return columns_of(dataset, self.fact_inputs, (), self.output_at(dataset))

    def indexed_fields(self, open_newest: Callable[[], lance.LanceDataset]) -> list[int | None]:
        newest = open_newest()
        return [field_ids(newest, name)[0] for name in self.columns if name in newest.schema.names]

    @property
    def identity(self) -> WorkIdentity:
        return WorkIdentity(self.kind, self.delivery, self.key_column, self._tag, self.table)

    def output_at(self, dataset: lance.LanceDataset) -> Output:
        if not is_group(self.field_id):
            return Output((self.column,))
        return Output(self.columns, self.columns, self.field_id)

    @property
    def _made_by(self) -> str:
        return f"by {', '.join(self.on)}"

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "udf": self.kind, "udf_version": self.udf_version, "loads": self.source}
