"""Note in a column's metadata if its values come from several UDF versions."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from airflow_geneva.faults import fault_point
from airflow_geneva.job.outbox import JOB_PROPERTY
from airflow_geneva.job.result import ShardResult
from airflow_geneva.lance_io.engine_errors import EngineError, engine_errors
from airflow_geneva.plan.model import JobSpec
from airflow_geneva.plan.previous_inputs import version_label
from airflow_geneva.storage.location import TableLocation
from airflow_geneva.udf.definition import MIXED_VERSIONS_KEY

logger = logging.getLogger("airflow_geneva.run")

_MIXED = "mixed:"


def record_mixed_versions(location: TableLocation, work: JobSpec, shards: Sequence[ShardResult], whole: bool) -> None:
    """Write, change or remove the note ``mixed:<version>,<version>``; usually there is nothing to change.

    The note is for readers of the table; the column's ledgers say which rows have which version.

    Args:
        shards: the committed shards.
        whole: whether all planned shards were committed.

    Raises:
        TableRemade: the table was dropped and created again.
    """
    import lance

    if not shards:
        return
    taken = work.continue_from if any(shard.rows_taken for shard in shards) else ()
    makers = sorted({version_label(maker) for maker in (*work.makers, *taken)})
    left = not whole or any(shard.rows_left for shard in shards)
    dataset = location.open()
    field = next((field for field in dataset.lance_schema.fields() if field.id() == work.field_id), None)
    if field is None:
        return
    noted = (dataset.schema.field(field.name()).metadata or {}).get(MIXED_VERSIONS_KEY.encode(), b"").decode()
    wanted = noted
    if makers:
        wanted = _MIXED + ",".join([*makers, work.udf_version])
    elif not (left or work.where or work.read_version):
        wanted = ""
    if wanted == noted:
        return
    operation = lance.LanceOperation
    update = operation.UpdateMap({MIXED_VERSIONS_KEY: wanted or None}, False)
    transaction = lance.Transaction(
        read_version=dataset.version,
        operation=operation.UpdateConfig(field_metadata_updates={work.field_id: update}),
        transaction_properties={JOB_PROPERTY: work.job_id},
    )
    options = dataset._storage_options
    work.written.look(location.options)
    fault_point("note.write")
    try:
        with engine_errors():
            committed = lance.LanceDataset.commit(dataset.uri, transaction, storage_options=options)
    except EngineError as error:
        logger.warning("Cannot write the note %r to the metadata of column %s: %s", wanted, work.column, error)
        return
    fault_point("note.written")
    work.written.check_after_commit(location.options, committed, transaction)
