"""Submit rows to a service's batch API, and collect the results once they are available."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from airflow_geneva.engine.apply.batch_mapper import BatchMapper
from airflow_geneva.engine.apply.narrowing import RowFailed, skip_or_fail
from airflow_geneva.engine.apply.udf_call import BatchResults, MappedBatch, Mapper, describe_failure, users_frames
from airflow_geneva.engine.checkpoint.records import ROW_ID
from airflow_geneva.engine.checkpoint.submissions import Submission, Submissions
from airflow_geneva.engine.counts import Usage
from airflow_geneva.engine.display import counted
from airflow_geneva.engine.faults import fault_point
from airflow_geneva.engine.lance_io.arrays import rows_at
from airflow_geneva.engine.lance_io.row_keys import row_keys
from airflow_geneva.engine.lance_io.to_arrow import OutputMismatch, array_from_result, array_from_values
from airflow_geneva.engine.limits.calls import retry_after
from airflow_geneva.engine.limits.rate_limit import count, is_used_up, may_go_on
from airflow_geneva.engine.runtime import threading, time
from airflow_geneva.engine.storage.engine_errors import as_failure
from airflow_geneva.engine.udf.error_policy import Retry, Skip, deciding_rule, matching_rules_of, pause_before, rules_of
from airflow_geneva.errors import BatchFailed, InvalidInput, UdfError


class StillWaiting(BaseException):
    """A service has not answered yet; `batches` has the number of waiting rows by name of their submission."""

    def __init__(self, batches: Mapping[str, int]) -> None:
        super().__init__(f"a service has {counted(sum(batches.values()), 'row')}")
        self.batches = dict(batches)


@dataclass
class _Answers:
    """A service's answers to the rows of a batch.

    Args:
        taken: arrays of values, each with its rows.
        failures: by row, its submission, its position in it, and its error.
        places: submissions with the positions of the rows in them.
    """

    taken: list[tuple[pa.Array, list[int]]] = field(default_factory=list)
    failures: dict[int, tuple[Submission, int, Exception]] = field(default_factory=dict)
    places: list[tuple[Submission, list[int]]] = field(default_factory=list)


class BatchApiMapper(BatchMapper):
    """Submits rows that are not submitted yet, and returns a batch once the service has answered all of its rows."""

    needs_row_ids = True

    def __init__(self, mapper: Mapper, submissions: Submissions | None) -> None:
        if submissions is None:
            raise InvalidInput(
                f"UDF {mapper.udf.name!r} is a batch API, which answers after minutes or hours. It cannot be tried on "
                "a sample of rows; run it on a few with where= or max_rows=."
            )
        self.mapper = mapper
        self.name = mapper.udf.name
        self.rules = rules_of(mapper.udf.on_error)
        self.submissions = submissions
        self._api: Any = None
        self._setting_up = threading.Lock()
        self._ready: dict[str, bool] = {}
        self._failed: dict[str, BatchFailed] = {}
        self._fetched: tuple[str, pa.Array, dict[int, Exception]] | None = None

    def __call__(self, batch: pa.RecordBatch) -> MappedBatch:
        """Map a batch, which must have the row ids; raise StillWaiting like `collect`."""
        answers, results = self.collect(batch), BatchResults(self.mapper, self._inputs(batch), self.rules)
        for submission, positions in answers.places:
            submission.collected[positions] = True
        return self._mapped(results, answers) if results.rows else results.mapped()

    def collect(self, batch: pa.RecordBatch) -> _Answers:
        """Submit the rows of a batch that are not submitted yet, and fetch the answers to the others.

        A view first calls this for all of its batch APIs, so answers fetched here may not reach a checkpoint.

        Raises:
            StillWaiting: some of the rows are submitted but not answered.
        """
        inputs = self._inputs(batch)
        row_ids = batch.column(ROW_ID)
        rows = row_keys(inputs.append_column(ROW_ID, row_ids))
        places = self.submissions.find(rows, row_ids)
        by_submission: dict[Submission, list[int]] = {}
        for row, found in enumerate(places):
            if found:
                by_submission.setdefault(found[-1][0], []).append(row)
        due = [row for row, found in enumerate(places) if not found]
        waiting: dict[str, int] = {}
        gone: dict[Submission, list[int]] = {}
        for submission, its_rows in by_submission.items():
            state = self.state_of(submission)
            if state == "gone":
                gone[submission] = its_rows
            elif state == "waiting":
                waiting[submission.name] = len(its_rows)
        for submission, its_rows in gone.items():
            if len(its_rows) == submission.rows:
                # Use the same order and key, so that a service that has the batch after all recognizes it.
                same = sorted(its_rows, key=lambda row: places[row][-1][1])
                waiting |= self._submit(inputs, rows, row_ids, same, submission.name)
            else:
                self.submissions.remove(submission)
                due += its_rows
        answers = _Answers()
        if not (due or waiting):
            due = self._take_answers(by_submission, places, answers)
        if due:
            waiting |= self._submit(inputs, rows, row_ids, sorted(due))
        if waiting:
            raise StillWaiting(waiting)
        return answers

    def _take_answers(
        self,
        by_submission: Mapping[Submission, Sequence[int]],
        places: Sequence[Sequence[tuple[Submission, int]]],
        answers: _Answers,
    ) -> list[int]:
        """Add the service's answers for the rows of a batch to `answers`; return the rows to submit again."""
        again: list[int] = []
        for submission, its_rows in by_submission.items():
            values, errors = self._fetch(submission)
            at = {row: places[row][-1][1] for row in its_rows}
            good = [row for row in its_rows if at[row] not in errors]
            answers.taken.append((rows_at(values, pa.array([at[row] for row in good], pa.int64())), good))
            answers.places.append((submission, list(at.values())))
            for row in its_rows:
                if (error := errors.get(at[row])) is None:
                    continue
                if self._may_submit_again(submission, places[row], error):
                    again.append(row)
                else:
                    answers.failures[row] = (submission, at[row], error)
        self._count_cost(len(again))
        if again and is_used_up():
            may_go_on()
        return again

    def state_of(self, submission: Submission) -> str:
        """Ask the service for a batch's state: ``waiting``, ``ready``, or ``gone`` if the service never received it."""
        if submission.name in self._ready:
            return "ready" if self._ready[submission.name] else "waiting"
        if not submission.sent and (state := self._state_without_handle(submission)) is not None:
            return state
        try:
            ready = self._ask("poll", submission.handle)
            if not isinstance(ready, (bool, np.bool_)):
                raise UdfError(
                    f"UDF {self.name!r}: poll returned {ready!r:.200}. Return True if the service has answered, else "
                    "False. The batch is kept."
                )
        except BatchFailed as error:
            self._failed[submission.name] = error
            ready = True
        self._ready[submission.name] = ready
        return "ready" if ready else "waiting"

    def _state_without_handle(self, submission: Submission) -> str | None:
        """Return the state of a batch without a handle; None: the service had one, which is recorded now."""
        may_find = hasattr(self.api, "find")
        handle = self._ask("find", submission.name) if may_find else None
        if handle is not None:
            self._keep_handle(submission, handle)
            return None
        if submission.may_be_underway():
            return "waiting"
        if may_find:
            # The service may have received the batch just before the submitting process died.
            missed = self.submissions.missed(submission)
            return "waiting" if missed < self.visible_after else "gone"
        raise UdfError(
            f"UDF {self.name!r}: a process was killed while it submitted {counted(submission.rows, 'row')}, and "
            f"the class has no find(key) that asks the service whether it has batch {submission.name!r}. Look there. "
            f"If it has none, or may compute the rows again, remove {self.submissions.path(submission)} and run again."
        )

    @property
    def visible_after(self) -> float:
        return self.mapper.udf.visible_after or 0.0

    @property
    def api(self) -> Any:
        with self._setting_up:
            self._api = self._api or self.mapper.set_up()
        return self._api

    def _inputs(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return self.mapper.inputs(batch.drop_columns([ROW_ID]))

    def _submit(
        self,
        inputs: pa.RecordBatch,
        keys: Sequence[bytes],
        row_ids: pa.Array,
        chosen: Sequence[int],
        again: str | None = None,
    ) -> dict[str, int]:
        """Submit rows as one batch, or resubmit them as batch `again`; record rows before and the handle after."""
        taken = pa.array(chosen, pa.int64())
        with self.submissions.begin([keys[row] for row in chosen], row_ids.take(taken), again) as submission:
            self._send(rows_at(inputs, taken), submission)
        return {submission.name: submission.rows}

    def _send(self, inputs: pa.RecordBatch, submission: Submission) -> None:
        fault_point("batch.submit")
        given = (inputs, submission.name) if self.mapper.udf.signature.takes_key else (inputs,)
        try:
            handle = self._ask("submit", *given, again=submission.name)
        except UdfError:
            if not hasattr(self.api, "find"):
                self.submissions.remove(submission)
            raise
        fault_point("batch.submitted")
        try:
            handle = json.loads(json.dumps(handle))
        except (TypeError, ValueError) as error:
            raise UdfError(
                f"UDF {self.name!r}: submit returned {handle!r:.200}, which is no handle: it must be a text, or what "
                f"JSON can hold ({error}). The service may have the batch, as {submission.name!r}."
            ) from error
        self._keep_handle(submission, handle)
        fault_point("batch.kept")

    def _keep_handle(self, submission: Submission, handle: Any) -> None:
        """Record the handle of a batch that the service has; count its rows as run if this job submitted it."""
        self.submissions.keep_handle(submission, handle)
        if submission.job_id == self.submissions.job_id:
            count(Usage(rows=submission.rows))

    def _ask(self, method: str, *given: Any, again: str | None = None) -> Any:
        """Call a method of the UDF's class; repeat failed calls as often as a `Retry` rule allows.

        Args:
            again: for `submit`, the name of the batch; before a repeated call, `find` asks whether the service has it.
        """
        tries = 0
        while True:
            try:
                return getattr(self.api, method)(*given)
            except BaseException as raised:
                error = as_failure(raised)
                if isinstance(error, BatchFailed) and method in ("poll", "fetch"):
                    raise
                tries += 1
                rule = deciding_rule(self.rules, matching_rules_of(self.rules, type(error)), tries)
                found = None if rule is None else self.rules[rule]
                if not isinstance(found, Retry):
                    kept = "" if method == "submit" else " The batch is kept: run again, which asks the service again."
                    failure = describe_failure(error, (), users_frames(error))
                    raise UdfError(
                        f"UDF {self.name!r} raised {failure.name} in {method}: {failure.message}.{kept}\n"
                        f"{failure.traceback}",
                        call=failure,
                    ) from error
                failed = time.monotonic()
                time.sleep(pause_before(found, tries))
                # A 429 means that the service refused the request; after another exception, it may have the batch.
                if again is not None and retry_after(error) is None and hasattr(self.api, "find"):
                    handle = self._find_until(again, failed + self.visible_after)
                    if handle is not None:
                        return handle

    def _find_until(self, key: str, until: float) -> Any:
        """Ask the service for a batch until time `until`, when it would list it; None: it does not have the batch."""
        while True:
            handle, left = self._ask("find", key), until - time.monotonic()
            if handle is not None or left <= 0:
                return handle
            time.sleep(min(left, self.mapper.udf.poll_interval or left))

    def _fetch(self, submission: Submission) -> tuple[pa.Array, dict[int, Exception]]:
        """Return the values of a batch, NULL for failed rows, and the errors of these by position."""
        if self._fetched is not None and self._fetched[0] == submission.name:
            return self._fetched[1:]
        kind, rows = self.mapper.udf.data_type, submission.rows
        failed = self._failed.get(submission.name)
        answers: Any = ()
        if failed is None:
            try:
                answers = self._ask("fetch", submission.handle)
            except BatchFailed as error:
                failed = error
        if failed is not None:
            return pa.nulls(rows, kind), dict.fromkeys(range(rows), failed)
        in_order = hasattr(answers, "__len__") and not isinstance(answers, (str, bytes, Mapping, Set))
        if not in_order or len(answers) != rows:
            got = counted(len(answers), "value") if in_order else repr(answers)[:200]
            raise UdfError(
                f"UDF {self.name!r}: fetch returned {got} for a batch of {counted(rows, 'row')}. Return one for each "
                "row, in the order in which they were submitted; for a row that failed, an exception."
            )
        errors: dict[int, Exception] = {}
        try:
            if isinstance(answers, (pa.Array, pa.ChunkedArray, pa.RecordBatch)):
                values = array_from_result(answers, kind)
            else:
                errors = {at: answer for at, answer in enumerate(answers) if isinstance(answer, Exception)}
                values = array_from_values([None if at in errors else one for at, one in enumerate(answers)], kind)
        except OutputMismatch as mismatch:
            raise UdfError(
                f"UDF {self.name!r}: fetch returned values that are no {kind}: {mismatch}. The batch is kept: with a "
                "version= of its own, the UDF keeps it when you change fetch."
            ) from mismatch
        self._fetched = (submission.name, values, errors)
        return values, errors

    def _may_submit_again(
        self, submission: Submission, places: Sequence[tuple[Submission, int]], error: Exception
    ) -> bool:
        """Whether to submit a failed row again: always if another job submitted it, else as a `Retry` rule allows."""
        own = [one for one, _ in places if one.job_id == self.submissions.job_id]
        if submission not in own:
            return True
        rule = deciding_rule(self.rules, matching_rules_of(self.rules, type(error)), len(own))
        return rule is not None and isinstance(self.rules[rule], Retry)

    def _mapped(self, results: BatchResults, answers: _Answers) -> MappedBatch:
        """Combine the values in row order, and apply the error policy to failed rows."""
        results.answered(0, results.rows)
        self._count_cost(results.rows)
        taken, failures = answers.taken, answers.failures
        kind = self.mapper.udf.data_type
        order = np.array([row for _, rows in taken for row in rows] + list(failures), np.int64)
        joined = pa.concat_arrays([*(values for values, _ in taken), pa.nulls(len(failures), kind)])
        values, at = rows_at(joined, pa.array(np.argsort(order), pa.int64())), 0
        for row in sorted(failures):
            error = failures[row][2]
            results.put(at, values.slice(at, row - at))
            at = row + 1
            failure = describe_failure(error, matching_rules_of(self.rules, type(error)), users_frames(error))
            try:
                skip_or_fail(results, row, self._skip_rule(error), failure)
            except RowFailed as failed:
                ending: dict[Submission, list[int]] = {}
                for submission, position, cause in failures.values():
                    if self._skip_rule(cause) is None:
                        ending.setdefault(submission, []).append(position)
                for submission, positions in ending.items():
                    self.submissions.report(submission, positions)
                raise results.failed(failed.row, failed.trouble) from error
        results.put(at, values.slice(at))
        return results.mapped()

    def _count_cost(self, rows: int) -> None:
        """Count the cost of answered rows, including failed rows that are submitted again."""
        count(Usage(declared=rows * (self.mapper.udf.cost or 0.0)))

    def _skip_rule(self, error: Exception) -> int | None:
        rule = deciding_rule(self.rules, matching_rules_of(self.rules, type(error)), None)
        return rule if rule is not None and isinstance(self.rules[rule], Skip) else None
