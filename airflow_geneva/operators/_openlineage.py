"""OpenLineage events of a finished backfill or refresh: datasets, versions and column lineage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from airflow_geneva.engine import api
from airflow_geneva.engine.results import BackfillResult

if TYPE_CHECKING:
    import lance

IDENTITY, TRANSFORMATION, FILTER = "IDENTITY", "TRANSFORMATION", "FILTER"
_COUNTS = ("rows_run", "rows_computed", "rows_reused", "rows_skipped", "rows_failed", "rows_left")


@dataclass(frozen=True)
class ColumnSource:
    """The lineage of one written column: its source columns, `IDENTITY` or `TRANSFORMATION`, and what computes it."""

    column: str
    inputs: tuple[str, ...]
    how: str
    by: str


def dataset_name(uri: str) -> tuple[str, str]:
    """Return namespace and name of a table's folder, by OpenLineage's naming rules for files and objects."""
    parts = urlsplit(uri)
    if parts.scheme in ("", "file"):
        return "file", parts.path
    return f"{parts.scheme}://{parts.netloc}", parts.path.lstrip("/")


def column_sources(spec: api.JobSpec) -> tuple[ColumnSource, ...]:
    """Return the columns that a plan computes, with their lineage."""
    if isinstance(spec, api.RefreshSpec):
        return tuple(_of_view(spec.definition))
    return tuple(
        ColumnSource(name, udf.columns or spec.inputs, TRANSFORMATION, _describe_udf(udf.function_name, udf.version))
        for udf in spec.udfs.values()
        for name in spec.columns
    )


def filter_columns(spec: api.JobSpec, source: lance.LanceDataset) -> tuple[str, ...]:
    """Return the source columns of the filter."""
    return tuple(spec.filter_columns(source.schema.names))


def _of_view(definition: api.ViewDefinition) -> Iterator[ColumnSource]:
    names = [column.name for column in definition.source_reads]
    earlier: dict[str, tuple[str, ...]] = {}
    by_first: dict[str, ColumnSource] = {}
    for column in definition.columns:
        if column.udf is not None:
            inputs = tuple(dict.fromkeys(part for name in column.columns for part in earlier.get(name, (name,))))
            by = _describe_udf(column.udf.function_name, column.udf.version)
            found = ColumnSource(column.name, inputs, TRANSFORMATION, by)
        elif column.kind == "sibling":
            found = replace(by_first[column.of or ""], column=column.name)
        elif column.kind == "column":
            found = ColumnSource(column.name, (str(column.expression),), IDENTITY, "")
        else:
            mentioned = tuple(column.mentioned(names))
            found = ColumnSource(column.name, mentioned, TRANSFORMATION, f"SQL {column.expression}")
        earlier[column.name] = found.inputs
        by_first[column.first_name or column.name] = found
        yield found


def _describe_udf(name: str, version: str) -> str:
    return f"UDF {name}, version {version}"


def lineage_of(job: api.PlannedJob, result: BackfillResult) -> Any:
    """Return the `OperatorLineage` of a finished job; None if the OpenLineage provider is not installed."""
    try:
        from airflow.providers.openlineage.extractors import OperatorLineage
        from openlineage.client.event_v2 import InputDataset, OutputDataset
        from openlineage.client.facet_v2 import (
            RunFacet,
            column_lineage_dataset,
            data_quality_assertions_dataset,
            dataset_version_dataset,
            output_statistics_output_dataset,
            schema_dataset,
        )
    except ImportError:
        return None
    spec = job.spec
    source = spec.rows_of.location(job.location.options)
    read, written = source.open(spec.rows_of.version), job.location.open()
    namespace, name = dataset_name(source.uri)

    def inputs(columns: tuple[str, ...], kind: str, how: str, by: str) -> list[Any]:
        made_by = [column_lineage_dataset.Transformation(kind, how, by or None)]
        return [column_lineage_dataset.InputField(namespace, name, column, made_by) for column in columns]

    def schema(dataset: lance.LanceDataset) -> Any:
        fields = [schema_dataset.SchemaDatasetFacetFields(name=f.name, type=str(f.type)) for f in dataset.schema]
        return schema_dataset.SchemaDatasetFacet(fields=fields)

    def facets(dataset: lance.LanceDataset) -> dict[str, Any]:
        version = dataset_version_dataset.DatasetVersionDatasetFacet(datasetVersion=str(dataset.version))
        return {"schema": schema(dataset), "version": version}

    lineage = column_lineage_dataset.ColumnLineageDatasetFacet(
        fields={
            made.column: column_lineage_dataset.Fields(inputs(made.inputs, "DIRECT", made.how, made.by))
            for made in column_sources(spec)
        },
        dataset=inputs(filter_columns(spec, read), "INDIRECT", FILTER, ""),
    )
    counts = {name: getattr(result, name) for name in _COUNTS}
    rows = result.rows_computed + result.rows_reused
    statistics = output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(rowCount=rows)
    quality: dict[str, Any] = {}
    if result.checked:
        assertion = data_quality_assertions_dataset.Assertion
        # The client's classes allow this facet for inputs only; its schema allows it for any dataset.
        quality["dataQualityAssertions"] = data_quality_assertions_dataset.DataQualityAssertionsDatasetFacet(
            assertions=[assertion(one.expectation, one.passed, column=one.column) for one in result.checked]
        )
    out_namespace, out_name = dataset_name(job.location.uri)
    return OperatorLineage(
        inputs=[InputDataset(namespace, name, facets=facets(read))],
        outputs=[
            OutputDataset(
                out_namespace,
                out_name,
                facets={**facets(written), "columnLineage": lineage},
                outputFacets={"outputStatistics": statistics, **quality},
            )
        ],
        run_facets={"geneva_rows": RunFacet().with_additional_properties(**counts)},
    )
