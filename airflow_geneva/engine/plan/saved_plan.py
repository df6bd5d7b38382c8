"""Store a plan beside the table: a small header, and a part per shard, so that each task reads only its own part."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from airflow_geneva.engine.job.folder import JobFolder, plan_name
from airflow_geneva.engine.job.status import DAMAGED
from airflow_geneva.engine.lance_io.table_versions import PlannedTable
from airflow_geneva.engine.plan.load_spec import LoadSpec
from airflow_geneva.engine.plan.model import BackfillSpec, JobSpec, Plan, RefreshSpec
from airflow_geneva.engine.plan.shard import Shard
from airflow_geneva.engine.plan.sizing import Sizing
from airflow_geneva.engine.plan.swap_plan import SwapPlan
from airflow_geneva.engine.storage.documents import LARGEST_PLAN, MOST_PLAN_VALUES, parse
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.engine.storage.uri import sha256
from airflow_geneva.engine.udf.code_archive import CodeArchive
from airflow_geneva.errors import InvalidInput

_FORMAT = 7
_XCOM_SHARD_BYTES = 12_000
_XCOM_BYTES = 900_000


_SPECS: tuple[type[JobSpec], ...] = (BackfillSpec, LoadSpec, RefreshSpec)
_KINDS = {spec.kind: spec for spec in _SPECS}


def job_spec_from_json(document: Mapping[str, Any]) -> JobSpec:
    """Parse a specification; KeyError or TypeError for any other document, or one of another package version."""
    fields: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in document.items()}
    kind = _KINDS[fields.pop("kind")]
    fields["sizing"] = Sizing(**fields["sizing"])
    fields["tables"] = tuple(_table(table) for table in fields["tables"])
    fields["codes"] = tuple(CodeArchive(**code) for code in fields["codes"])
    return kind(**fields)


def _table(table: Mapping[str, Any]) -> PlannedTable:
    return PlannedTable(**{**table, "places": tuple(table.get("places", ()))})


@dataclass(frozen=True)
class SavedPlan:
    """The header of a stored plan: everything except its fragments.

    Args:
        fingerprint: SHA-256 of the header, which holds the digests of the parts.
        shards: for each shard its ``file`` and ``sha256``, and its sizes, with which the job's status begins.
        swap: for a refresh, ``file`` and ``sha256`` of its swap.
        ledgers: number of the column's ledgers that no fold covers; None: unknown.
    """

    fingerprint: str
    spec: JobSpec
    shards: tuple[Mapping[str, Any], ...]
    rows_total: int
    rows_skipped: int
    notes: tuple[str, ...]
    swap: Mapping[str, str] | None = None
    ledgers: int | None = None

    @staticmethod
    def read(folder: JobFolder) -> SavedPlan | None:
        """Read the plan that a job's record names; None if it was removed or never written."""
        plan = folder.record.get("plan")
        return None if plan is None or not folder.storage.exists(plan_name(plan)) else load_plan(folder.storage, plan)

    def load_shard(self, job: Storage, index: int) -> Shard:
        """Read one shard and check its digest against the header."""
        entry = self.shards[index]
        with _damaged(job, entry["file"]):
            return Shard.load(_checked(job, entry["file"], entry["sha256"]))

    def load_swap(self, job: Storage) -> SwapPlan:
        """Read the swap of a refresh and check its digest against the header."""
        if self.swap is None:
            raise InvalidInput(f"The plan {job.path(plan_name(self.fingerprint))} is not a refresh's.")
        with _damaged(job, self.swap["file"]):
            return SwapPlan.load(_checked(job, self.swap["file"], self.swap["sha256"]))


def plan_documents(plan: Plan, run: str = "") -> tuple[SavedPlan, dict[str, bytes]]:
    """Return a plan's header and its documents by name; `run` gives equal plans of two runs different fingerprints."""
    documents: dict[str, bytes] = {}
    entries = [{**_part(documents, shard.dump()), **_sizes(shard)} for shard in plan.shards]
    header = {
        "format": _FORMAT,
        "run": run,
        "spec": plan.spec.to_json(),
        "shards": entries,
        "rows_total": plan.rows_total,
        "rows_skipped": plan.rows_skipped,
        "notes": list(plan.notes),
        "ledgers": plan.ledgers,
    }
    if plan.swap is not None:
        header["swap"] = _part(documents, plan.swap.dump())
    data = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    fingerprint = sha256(data)
    documents[plan_name(fingerprint)] = data
    return _saved(fingerprint, parse(data, LARGEST_PLAN, MOST_PLAN_VALUES)), documents


def _sizes(shard: Shard) -> dict[str, int]:
    """Return the sizes of a shard before it runs."""
    staged = [fragment.rows for fragment in shard.fragments.single if fragment.staged]
    return {
        "rows": shard.rows,
        "fragments": len(shard.fragments),
        "staged": len(staged),
        "rows_staged": sum(staged),
        "rows_held": shard.rows - sum(staged) - shard.rows_to_run,
    }


def _part(documents: dict[str, bytes], data: bytes) -> dict[str, Any]:
    """Add a shard or the swap of a plan to its documents."""
    digest = sha256(data)
    name = f"part-{digest[:16]}.json"
    documents[name] = data
    return {"file": name, "sha256": digest}


def load_plan(job: Storage, fingerprint: str) -> SavedPlan:
    """Read a plan's header and check it against the fingerprint from XCom."""
    name = plan_name(fingerprint)
    with _damaged(job, name):
        header = parse(_checked(job, name, fingerprint), LARGEST_PLAN, MOST_PLAN_VALUES)
        if header["format"] != _FORMAT:
            raise InvalidInput(
                f"The plan {name} has format {header['format']}, this version of airflow_geneva reads {_FORMAT}. Clear "
                "the plan task with its downstream tasks."
            )
        return _saved(fingerprint, header)


def shard_summaries(plan: Plan, saved: SavedPlan, job: Storage) -> list[dict[str, Any]]:
    """Make the XCom value of a plan: for each shard the plan's URI and digest, and the first fragments that fit.

    Fragments beyond about 12 KB per shard or 900 KB in total are only in the plan's documents.
    """
    summaries = []
    budget = min(_XCOM_SHARD_BYTES, _XCOM_BYTES // max(len(plan.shards), 1))
    for shard, entry in zip(plan.shards, saved.shards, strict=True):
        fragments: list[dict[str, Any]] = []
        used = 0
        for task in shard.fragments:
            item = {"id": task.id, "srcfiles": task.files.srcfiles, "missing": task.missing_selected.pairs()}
            used += len(json.dumps(item))
            if used > budget - 600:
                break
            fragments.append(item)
        summaries.append(
            {
                "plan_uri": job.path(plan_name(saved.fingerprint)),
                "fingerprint": saved.fingerprint,
                "job_id": saved.spec.job_id,
                "table": saved.spec.table_name,
                "shard": shard.index,
                "shards": len(plan.shards),
                "checkpoint_prefix": saved.spec.prefix,
                "title": shard.title,
                "rows": entry["rows"],
                "fragment_count": len(shard.fragments),
                "to_apply": len(shard.to_apply),
                "fragments": fragments,
            }
        )
    return summaries


def _saved(fingerprint: str, header: Mapping[str, Any]) -> SavedPlan:
    return SavedPlan(
        fingerprint,
        job_spec_from_json(header["spec"]),
        tuple(header["shards"]),
        header["rows_total"],
        header["rows_skipped"],
        tuple(header["notes"]),
        header.get("swap"),
        header.get("ledgers"),
    )


@contextmanager
def _damaged(job: Storage, name: object) -> Iterator[None]:
    """Convert the errors of a document with the SHA-256 that was named, and another content than a plan writes."""
    try:
        yield
    except InvalidInput:
        raise
    except DAMAGED as error:
        raise InvalidInput(
            f"The plan document {name!r:.200} in {job.root} is not one of this version of airflow_geneva, or damaged "
            f"({error!r:.200}). Clear the plan task with its downstream tasks."
        ) from error


def _checked(job: Storage, name: str, digest: str) -> bytes:
    try:
        data = job.read_bytes(name, LARGEST_PLAN)
    except FileNotFoundError as error:
        raise InvalidInput(
            f"The plan document {job.path(name)} is gone. Clear the plan task with its downstream tasks."
        ) from error
    except ValueError as error:
        raise InvalidInput(
            f"The plan document {job.path(name)} cannot be read: {error}. Clear the plan task with its downstream "
            "tasks, and cut the work into smaller shards: shard_size."
        ) from error
    if sha256(data) != digest:
        raise InvalidInput(
            f"The plan document {job.path(name)} was changed after planning (its SHA-256 differs). "
            "Clear the plan task with its downstream tasks."
        )
    return data
