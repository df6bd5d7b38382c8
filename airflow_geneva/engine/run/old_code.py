"""Find the old code of a view, for refreshes that use it until the user decides about a code change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from airflow_geneva.engine.commit.view_state import CommittedViewState
from airflow_geneva.engine.job.folder import RECORD, JobFolder
from airflow_geneva.engine.job.status import job_ids
from airflow_geneva.engine.plan.model import JobSpec, Plan, RefreshSpec
from airflow_geneva.engine.plan.saved_plan import load_plan
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.udf.of_process import kept_udf
from airflow_geneva.engine.udf.settings import UdfDefinition
from airflow_geneva.engine.views.definition import Code, ViewDefinition
from airflow_geneva.errors import CodeChanged, InvalidInput


@dataclass(frozen=True)
class PlannedCode:
    """The UDFs with which a refresh is planned, by column.

    Args:
        job: the job whose code archives it uses instead of the code that this process imports; None: none.
        note: the plan's note about the old code.
    """

    udfs: Mapping[str, UdfDefinition]
    job: JobSpec | None = None
    archives: Mapping[str, bytes] = field(default_factory=dict)
    note: str = ""

    def noted_in(self, plan: Plan) -> Plan:
        """Return the plan with its note, and the archives that its tasks use."""
        if not self.note:
            return plan
        codes = self.job.codes if self.job else ()
        return replace(plan, notes=(self.note, *plan.notes), archives=self.archives).with_work(codes=codes)


def find_old_code(
    view: TableLocation, definition: ViewDefinition, state: CommittedViewState, now: Mapping[str, UdfDefinition]
) -> PlannedCode:
    """Return the UDFs of a view; if the code of a UDF changed, the code that computed the view's values.

    This process has the old code if a notebook defined it; otherwise it is in archives that an Airflow job stored.

    Raises:
        CodeChanged: the code changed, and the old code is not available.
    """
    then = dict(state.snapshot.code) if state.snapshot else {}
    changed = [name for name, udf in now.items() if then.get(name, udf.version) != udf.version]
    if not changed:
        return PlannedCode(now)
    kept = {name: kept_udf(now[name].name, then[name]) for name in changed}
    here = {name: udf.definition(now[name].input_columns) for name, udf in kept.items() if udf is not None}
    if len(here) == len(changed):
        return PlannedCode({**now, **here}, note=_note(changed, then, now, "is in this process"))
    for job, archives in _stored_code(view.checkpoints, definition.by_first_name(tuple((n, then[n]) for n in now))):
        # The job may have been planned before a promotion: its columns, and the inputs of some, have other names now.
        first = {column.first_name or column.name: column.udf for column in job.definition.columns}
        stored = {name: first[definition.column(name).first_name or name] for name in now}
        udfs = {name: replace(udf, input_columns=now[name].input_columns) for name, udf in stored.items() if udf}
        return PlannedCode(udfs, job, archives, _note(changed, then, now, f"was stored by job {job.job_id}"))
    versions = ", ".join(f"version {then[name]} of column {name!r}" for name in changed)
    raise CodeChanged(
        f'on_code_change="old_code" needs the code that view {view.name!r} was computed with, and it is not there: '
        f"{versions}. Only jobs of Airflow store code, as long as they are kept; a notebook has the code of its own "
        'cells. Deploy the old code again, or decide: on_code_change="recompute", or "new_rows".'
    )


def _note(changed: list[str], then: Mapping[str, str], now: Mapping[str, UdfDefinition], where: str) -> str:
    what = "; ".join(f"column {name!r} with version {then[name]}, not {now[name].version}" for name in changed)
    return (
        f"the code changed, and new rows are computed with the old code, which {where}: {what}. Decide with "
        f'on_code_change="recompute" or "new_rows"; view.compare({changed[0]!r}) shows values of both.'
    )


def _stored_code(checkpoints: Storage, versions: Code) -> Iterator[tuple[RefreshSpec, dict[str, bytes]]]:
    """Yield the jobs of a view that stored the code of these versions, newest first, with their archives.

    Args:
        versions: the versions by the columns' first names, which promotions do not change.
    """
    for name in job_ids(checkpoints):
        folder = JobFolder.of(checkpoints, name)
        plan = (folder.read(RECORD) or {}).get("plan")
        if not plan:
            continue
        try:
            work = load_plan(folder.storage, plan).work
        except InvalidInput:
            continue
        if not isinstance(work, RefreshSpec):
            continue
        if work.definition.by_first_name(tuple((name, udf.version) for name, udf in work.udfs.items())) != versions:
            continue
        found = {code.zip: archive for code in work.codes if (archive := code.read(folder.storage)) is not None}
        if found and len(found) == len({code.zip for code in work.codes}):
            yield work, found
