"""Record the plan of a job: its record, the plan's documents and the code of its UDFs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from airflow_geneva.engine.apply.advice import may_pass
from airflow_geneva.engine.checkpoint.facts import append_ledger
from airflow_geneva.engine.counts import StoreRequests
from airflow_geneva.engine.display import counted
from airflow_geneva.engine.faults import fault_point
from airflow_geneva.engine.job.folder import JobFolder, this_program
from airflow_geneva.engine.lance_io.table_versions import reporting_remade
from airflow_geneva.engine.plan.model import JobSpec, Plan
from airflow_geneva.engine.plan.saved_plan import SavedPlan, plan_documents
from airflow_geneva.engine.results import PENDING, STORE_REQUESTS
from airflow_geneva.engine.run.choice import RunnerChoice
from airflow_geneva.engine.runtime import time
from airflow_geneva.engine.storage.engine_errors import EngineError, is_refused, is_unavailable, remedy_of
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.storage.requests import take_requests
from airflow_geneva.engine.storage.uri import sha256
from airflow_geneva.engine.udf.code_archive import CodeArchive, archive_name, code_root, zip_code
from airflow_geneva.errors import CommitConflict, ExpectationFailed, GenevaError, TableRemade, UdfError

logger = logging.getLogger("airflow_geneva.run")


def record_plan(
    plan: Plan,
    location: TableLocation,
    choice: RunnerChoice | None = None,
    run: str = "",
    store_code: bool = False,
    about: Mapping[str, Any] | None = None,
    beside: Sequence[Callable[[], object]] = (),
    folder: JobFolder | None = None,
) -> SavedPlan:
    """Write a job's record and plan; from then on any process can carry the job out.

    Args:
        choice: where it will be computed, for the record; None: not decided.
        run: distinguishes two runs of one plan.
        store_code: store the UDFs' code beside the plan, for workers that do not have it; then the plan is written even
            if there is nothing to do.
        about: more fields for the job record, e.g. the Airflow run.
        beside: writes to make together with those of the record and the plan.
        folder: the job's folder, if the caller goes on with it.

    Raises:
        StorageError: the table's folder is read-only or unreachable.
        TableRemade: the table was dropped and created again.
    """
    folder = folder or JobFolder.of(location.checkpoints, plan.spec.job_id)
    archives: dict[str, bytes] = {}
    if store_code and plan.shards:
        codes, archives = _zip_code(plan.spec)
        plan = plan.with_work(codes=codes)
    plan = with_stamps(plan, location)
    spec = plan.spec
    record = {
        **spec.describe(),
        **({} if choice is None else choice.describe()),
        "started": time.time(),
        "started_by": this_program(),
        "state": PENDING,
        "rows_total": plan.rows_total,
        "rows_pending": plan.rows_pending,
        "shards": len(plan.shards),
        "reasons": plan.reasons,
        **(about or {}),
    }
    before = StoreRequests.from_json(record.get(STORE_REQUESTS))
    record[STORE_REQUESTS] = asdict(before + take_requests())
    saved, documents = plan_documents(plan, run)

    def write_record() -> None:
        folder.write_record(record, saved.fingerprint if plan.shards else None)
        fault_point("plan.recorded")

    def learn() -> None:
        if spec.field_id is not None:
            append_ledger(location.checkpoints, spec.field_id, spec.job_id, plan.learned)

    if folder.alone and not store_code and not plan.shards and plan.swap is None:
        # There is nothing to do: the record is written with the end of the job.
        folder.keep_record(record)
        learn()
        return saved
    with reporting_remade(spec.tables, location.options):
        # The record may be written before the documents that it names; a process reports documents that are missing.
        writes = (partial(folder.storage.write_bytes, *one) for one in {**archives, **documents}.items())
        folder.storage.side_by_side(write_record, learn, *writes, *beside)
    fault_point("plan.saved")
    _log_reused_checkpoints(plan)
    return saved


def with_stamps(plan: Plan, location: TableLocation) -> Plan:
    """Add the stamps of the planned versions, if the job has work to do and the plan has no stamps yet."""
    if not (plan.shards or (plan.swap and (plan.swap.gone or plan.swap.advances))):
        return plan
    tables = plan.spec.tables
    if any(table.commit for table in tables):
        return plan
    stamped = location.checkpoints.side_by_side(*(partial(table.stamped, location.options) for table in tables))
    return plan.with_work(tables=tuple(stamped))


def _zip_code(spec: JobSpec) -> tuple[tuple[CodeArchive, ...], dict[str, bytes]]:
    """Return the UDFs' modules or packages, each once, with their archives, so that the whole run uses this code."""
    modules = {udf.import_path.partition(":")[0]: udf.import_path for udf in spec.udfs.values() if udf.import_path}
    found, archives = {}, {}
    for path in modules.values():
        archive = zip_code(path)
        if archive is not None:
            digest = sha256(archive)
            found[digest] = CodeArchive(archive_name("code", archive), digest, code_root(path))
            archives[found[digest].zip] = archive
    return tuple(found.values()), archives


def _log_reused_checkpoints(plan: Plan) -> None:
    """Log which checkpoints a job reuses, and which it cannot use."""
    fragments, rows = plan.rows_held
    target = plan.spec.target
    if fragments:
        of = f"{counted(fragments, 'checkpointed fragment')} with {counted(rows, 'row')}"
        logger.info("Collected %s for %s.", of, target)
    for mismatch in plan.mismatches.shown:
        logger.warning("Checkpoint data files mismatch for %s, %s; it is not used.", target, mismatch)
    if plan.mismatches.more:
        more = counted(plan.mismatches.more, "more fragment")
        logger.warning("Checkpoint data files mismatch for %s in %s.", target, more)


def failure_message(spec: JobSpec, error: BaseException) -> str:
    kept = "\nComputed rows are kept in checkpoints"
    if isinstance(error, (TableRemade, ExpectationFailed)):
        kept = ""  # a table that was created again has none; the message of ExpectationFailed mentions them itself
    elif isinstance(error, UdfError) and (error.row_index is not None or error.call is not None):
        kept += "."  # the error says when to run it again
    elif _may_pass(error):
        kept += "; run it again to continue from there."
    else:
        kept += ". When the cause is corrected, the next run continues from there."
    advice = "" if isinstance(error, EngineError) else remedy_of(error)
    return f"{what_failed(spec)}: {error}{advice}{kept}"


def _may_pass(error: BaseException) -> bool:
    """Whether the same run may succeed later without any correction, for example after an outage."""
    if isinstance(error, (GenevaError, OSError)) and not isinstance(error, (TimeoutError, ConnectionError)):
        return isinstance(error, CommitConflict) or (is_unavailable(error) and not is_refused(error))
    return may_pass(error)


def what_failed(spec: JobSpec) -> str:
    return f"{spec.title} failed (job {spec.job_id})"
