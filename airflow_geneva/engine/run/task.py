"""Run the units of one task: threads read rows ahead of the function, and other threads keep its results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from math import inf
from typing import Any, TypeVar

from airflow_geneva.engine.apply.applier import Applier, StepResult
from airflow_geneva.engine.apply.batch_api import StillWaiting
from airflow_geneva.engine.apply.checkpoint_writer import CheckpointWriter
from airflow_geneva.engine.apply.dedup import KnownValues
from airflow_geneva.engine.apply.queues import Acknowledgments, ByteBudget, Queue, Stopped, Turns, Unkept
from airflow_geneva.engine.apply.reader import ReadSize, RowBatch, UnreadableFragment
from airflow_geneva.engine.apply.skipped_rows import SkipCount
from airflow_geneva.engine.apply.stages import Part, RowsAhead, joined
from airflow_geneva.engine.checkpoint.store import DelayedCheckpoints
from airflow_geneva.engine.job.busy import Busy
from airflow_geneva.engine.job.speed import SavedCalls, UdfSpeed
from airflow_geneva.engine.lance_io.row_ranges import Ranges
from airflow_geneva.engine.run.caps import CapReached
from airflow_geneva.engine.run.units import OpenedUnit, Target, Unit, UnitReport, open_unit, pause_before
from airflow_geneva.engine.runtime import Future, SimpleQueue, threading, time
from airflow_geneva.engine.storage.engine_errors import is_failure
from airflow_geneva.engine.storage.outages import asked_to_end

Item = TypeVar("Item")
_READERS = _KEEPERS = 4
_MOST_AHEAD = 256
"""The most units that are opened ahead, even if they have few rows."""
GRACE_SECONDS = 5.0
_LOOK_SECONDS = 0.02
"""Seconds between two polls for ended calls while no rows are ready for a call."""
_SOON_SECONDS = 2.0
"""Seconds of work that are left when a task asks for further units."""
_GONE = "computed rows were not there"


class TaskRunner:
    """Runs units in order; the thread that calls `run` also calls the function.

    A unit goes from a reader thread to the caller and then to a thread that writes checkpoints. If a UDF has a stage,
    threads between reader and caller preprocess its rows. Rows that wait for a call, and results that wait to be kept,
    take at most `buffer_bytes` each. If one of the threads fails, the others end, and its error is raised.
    """

    def __init__(
        self,
        target: Target,
        applier: Applier,
        reads: Any,
        delayed: DelayedCheckpoints,
        known: Iterable[KnownValues] = (),
        fitting: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self.target = target
        self.applier = applier
        self.names = applier.names = target.names
        self.reads = reads
        self.delayed = delayed
        self.known = tuple(known)
        self.fitting = fitting
        sizing = target.spec.sizing
        self.waits = _Waits(applier)
        self.buffer_bytes = sizing.batch_bytes // 2
        self.ahead = RowsAhead(applier.mapper, lambda: applier.rows_of_call, sizing.batch_bytes)
        read_bytes = self.buffer_bytes if self.ahead.threads else sizing.batch_bytes
        self.read_size = ReadSize.of(target.source, reads, read_bytes, applier.batch_size)
        self.knows_width = self.read_size.fitting.width is not None
        self.measuring = threading.Lock()

    @property
    def skipped(self) -> SkipCount:
        """The counter of rows that the job skips."""
        return self.applier.skipped

    def run(
        self,
        units: Sequence[Unit],
        on_rows: Callable[[int], None] = lambda rows: None,
        on_kept: Callable[[UnitReport, Unit], None] = lambda report, unit: None,
        more: Callable[[], Sequence[Unit]] | None = None,
    ) -> list[UnitReport]:
        """Compute and keep units; return a report of each and, last, a report of the work that belongs to no unit.

        Args:
            on_rows: called after every step; it may raise StopComputing.
            on_kept: called when a unit is done.
            more: returns further units, and nothing if there are none; called in a thread when the known units are
                nearly computed, so that further ones are read before the function waits.
        """
        self.applier.on_rows, self.applier.began, self.applier.called = on_rows, inf, 0.0
        self.waits = _Waits(self.applier)
        reports, times, began = list[UnitReport](), 0, time.monotonic()
        try:
            while units:
                passage = _Passage(self, units, on_kept, None if times else more, again=times > 0)
                try:
                    passage.run()
                finally:
                    reports += passage.reports
                units = passage.again
                if units:
                    # Another job that computes the same rows replaced or removed their checkpoint.
                    times += 1
                    pause_before(times, units[0].task, _GONE)
        except CapReached as reached:
            reached.reports = [*reports, self._rest(reports, began)]
            raise
        return [*reports, self._rest(reports, began)]

    def bytes_of(self, unit: Unit) -> int:
        """Estimate the bytes that a unit's rows take in memory."""
        return int(self.read_size.fitting.bytes_a_row * unit.rows)

    def rows_of(self, lane: _Lane, opened: OpenedUnit) -> Iterator[RowBatch]:
        """Read the rows of a unit once there is room for them; while their width is unknown, one reader at a time."""
        batches = opened.rows(self.reads, self.read_size)
        with nullcontext() if self.knows_width else self.measuring:
            if not self.knows_width and (first := next(batches, None)) is not None:
                self.knows_width, batches = True, chain([first], batches)
        lane.read.reserve(self.bytes_of(lane.unit))
        return batches

    def _rest(self, reports: Sequence[UnitReport], began: float) -> UnitReport:
        """Report the calls that equal inputs saved, the largest calls that fit, and the time without function calls."""
        saved = sum((known.take_saved() for known in self.known), SavedCalls())
        threads = self.target.spec.sizing.intra_applier_concurrency
        called = sum(report.speed.seconds for report in reports)
        beside = max((time.monotonic() - began) * threads - called, 0.0)
        return UnitReport(False, speed=UdfSpeed(saved=saved, seconds=beside, busy=self.busy, fitting=self.fitting()))

    @property
    def first_call(self) -> float:
        """When the function was called first, by the monotonic clock; infinity before its first result."""
        return self.applier.began

    @property
    def busy(self) -> Busy:
        """How busy the function was up to now."""
        applier, waits = self.applier, self.waits
        between = max(applier.finished - applier.began, 0.0)
        return Busy(between, applier.called, waits.reading, waits.preprocessing, waits.writing)


class _Waits:
    """Adds up the seconds for which the function waits, by cause, from its first call on."""

    def __init__(self, applier: Applier) -> None:
        self.reading = self.preprocessing = self.writing = 0.0
        self._applier = applier

    def take(self, items: Iterator[Item], starved: Callable[[], float]) -> Item | None:
        """Return the next item, or None; a wait counts as reading while the stage is starved, else as preprocessing."""
        since, before = time.monotonic(), starved()
        item = next(items, None)
        waited = self._since(since)
        reading = min(starved() - before, waited)
        self.reading, self.preprocessing = self.reading + reading, self.preprocessing + waited - reading
        return item

    @contextmanager
    def for_writing(self) -> Iterator[None]:
        since = time.monotonic()
        try:
            yield
        finally:
            self.writing += self._since(since)

    def _since(self, since: float) -> float:
        return time.monotonic() - since if self._applier.began < since else 0.0


class _Starved:
    """Adds up the seconds for which the stage waits for rows, including a current wait; one wait at a time."""

    def __init__(self) -> None:
        self._seconds, self._since = 0.0, inf

    def __call__(self) -> float:
        return self._seconds + max(time.monotonic() - self._since, 0.0)

    def around(self, items: Iterator[Item]) -> Iterator[Item]:
        while True:
            self._since = time.monotonic()
            try:
                item = next(items, None)
            finally:
                self._seconds, self._since = self(), inf
            if item is None:
                return
            yield item


class _Lane:
    """The queues of one unit: rows as read, rows ready to be called, and results.

    `parts` are preprocessed rows that wait for other parts of the same call.
    """

    def __init__(self, unit: Unit, reading: ByteBudget, preprocessing: ByteBudget | None, keeping: ByteBudget) -> None:
        self.unit = unit
        self.opened: OpenedUnit | None = None
        self.read = Queue[Any](reading)  # the opened unit, and then its batches
        self.rows = self.read if preprocessing is None else Queue[Any](preprocessing)
        self.run = Ranges.empty()
        self.parts = list[RowBatch]()
        self.has_ended = False
        self.steps = Queue[StepResult](keeping)
        self.last = Unkept(0.0)
        self.left = unit.rows
        self.speed = UdfSpeed()
        self.report: UnitReport | None = None


@dataclass(frozen=True)
class _End:
    """The end of a unit's rows, with the error if one ended them."""

    error: BaseException | None


class _Pace:
    """The rows that a passage still has to compute, and how fast it computes them."""

    def __init__(self) -> None:
        self.left = self._rows = 0
        self._since = inf

    def is_nearly_done(self, rows: int) -> bool:
        """Count the rows of a step; return whether the rest takes at most two seconds, or one more step."""
        self.left -= rows
        now = time.monotonic()
        if self._since == inf:
            self._since = now  # the first call may have loaded a model
            return self.left <= rows
        self._rows += rows
        return self.left <= rows or self.left * (now - self._since) <= _SOON_SECONDS * self._rows


class _Passage:
    """One passage of units through the threads. Units with missing rows at the end must run `again`."""

    def __init__(
        self,
        task: TaskRunner,
        units: Sequence[Unit],
        on_kept: Callable[[UnitReport, Unit], None],
        more: Callable[[], Sequence[Unit]] | None,
        again: bool,
    ) -> None:
        self.task = task
        self.on_kept = on_kept
        self.more = more
        self.looks_again = again
        stage = task.ahead.threads
        self.reading = ByteBudget(task.buffer_bytes // 2 if stage else task.buffer_bytes)
        self.preprocessing = ByteBudget(task.buffer_bytes // 2) if stage else None
        self.keeping = ByteBudget(task.buffer_bytes, takers_stop=False)
        most = task.applier.sizer.most
        self.acknowledged = Acknowledgments(self.keeping, task.target.spec.sizing.checkpoint_interval, most)
        self.lanes = list[_Lane]()
        self.unread, self.unstaged = SimpleQueue[_Lane | None](), SimpleQueue[_Lane | None]()
        self.pace = _Pace()
        self.asked: Future[bool] | None = None
        self.starved = _Starved()
        self.to_preprocess = zip(count(), self._parts(), strict=False)
        self.taking = threading.Lock()
        self.to_keep = SimpleQueue[_Lane | None]()
        self.again = list[Unit]()
        self.error: BaseException | None = None
        self._add(units)
        if more is None:
            self._add(())

    @property
    def reports(self) -> list[UnitReport]:
        """The reports of the units that are kept."""
        return [lane.report for lane in self.lanes if lane.report is not None]

    def run(self) -> None:
        threads = len(self.lanes) if self.more is None else _KEEPERS
        readers = self._start("read", self._read, min(_READERS, threads))
        if self.preprocessing is not None:
            readers += self._start(
                "stage", partial(self._preprocess, Turns(self.preprocessing)), self.task.ahead.threads
            )
        keepers = self._start("keep", self._keep, min(_KEEPERS, threads))
        try:
            for lane in self._in_order():
                take, put, end = partial(self._take, lane), partial(self._put, lane), partial(self._end_steps, lane)
                lane.opened = opened = take()
                self.to_keep.put(lane)
                self.task.applier.compute(lane.unit.task, opened.missing, iter(take, None), put, end)
            self.task.applier.finish()
            self._end(keepers)
        except BaseException as error:
            self.error = error
            self._stop_reading(error)
            try:
                self.task.applier.cancel(error)
            finally:
                for lane in self.lanes:
                    lane.steps.end(error)
                self._end(keepers, GRACE_SECONDS if asked_to_end(error) else None)
        for thread in readers:
            thread.join(GRACE_SECONDS)  # do not wait longer for a store that does not answer
        if self.error is not None:
            raise self.error

    def _end(self, keepers: Sequence[threading.Thread], seconds: float | None = None) -> None:
        """Let the keepers keep the results that they have, and wait for each to end, at most `seconds`."""
        for _ in keepers:
            self.to_keep.put(None)
        for thread in keepers:
            thread.join(seconds)

    def _add(self, units: Sequence[Unit]) -> None:
        """Add units, which are computed in this order; none: there are no further ones."""
        lanes = [_Lane(unit, self.reading, self.preprocessing, self.keeping) for unit in units]
        self.pace.left += sum(lane.left for lane in lanes)
        self.lanes += lanes
        for lane in lanes or (None,) * _READERS:
            self.unread.put(lane)
            self.unstaged.put(lane)

    def _in_order(self) -> Iterator[_Lane]:
        """Yield the known units, and then further ones."""
        at = 0
        while at < len(self.lanes) or self._more_came(at):
            yield self.lanes[at]
            at += 1

    def _more_came(self, known: int) -> bool:
        """Wait for further units; return whether there are any."""
        while self.more is not None and len(self.lanes) == known:
            if not self._ask().result():
                return False
        return len(self.lanes) > known

    def _ask(self) -> Future[bool]:
        """Ask for further units in a thread, unless that is going on, or there are none."""
        if self.asked is None or (self.asked.done() and not self.asked.exception() and self.asked.result()):
            self.asked = Future[bool]()
            self._start("ask", partial(self._answer, self.asked), 1)
        return self.asked

    def _answer(self, asked: Future[bool]) -> None:
        assert self.more is not None
        try:
            units = self.more()
            self._add(units)
            asked.set_result(bool(units))
        except BaseException as error:
            asked.set_exception(error)

    def _stop_reading(self, error: BaseException) -> None:
        self._add(())
        self.reading.stop(error)
        if self.preprocessing is not None:
            self.preprocessing.stop(error)

    def _start(self, name: str, run: Callable[[], None], count: int) -> list[threading.Thread]:
        threads = []
        for _ in range(count):
            thread = threading.Thread(target=copy_context().run, args=(run,), name=f"geneva-{name}", daemon=True)
            thread.start()
            threads.append(thread)
        return threads

    def _read(self) -> None:
        task, limit = self.task, self.reading.limit
        while (lane := self.unread.get()) is not None:
            try:
                opened = open_unit(task.target, lane.unit, self.looks_again)
                lane.read.put(opened, limit // _MOST_AHEAD)
                for rows in task.rows_of(lane, opened):
                    lane.read.put(rows, rows.nbytes)
            except Stopped:
                return
            except UnreadableFragment as error:
                lane.read.end(error)
                continue
            except BaseException as error:
                lane.read.end(error)
                return
            lane.read.end()

    def _parts(self) -> Iterator[tuple[_Lane, OpenedUnit | Part | _End]]:
        """Yield each opened unit, then its rows in parts, then the end of the rows."""
        for lane in iter(self.unstaged.get, None):
            error: BaseException | None = None
            try:
                rows = self.starved.around(lane.read)
                opened = next(rows)
                lane.run = opened.missing
                yield lane, opened
                for part in self.task.ahead.parts(rows, lane.run):
                    yield lane, part
            except GeneratorExit:
                raise
            except BaseException as failed:
                error = failed
            yield lane, _End(error)

    def _preprocess(self, turns: Turns) -> None:
        """Preprocess parts; the threads take parts one at a time, and hand them over in the same order."""
        while True:
            with self.taking:
                taken = next(self.to_preprocess, None)
            if taken is None:
                return
            number, (lane, item) = taken
            try:
                made = self.task.ahead.prepare(item.rows, lane.run) if isinstance(item, Part) else item
            except BaseException as error:
                made = _End(error)
            try:
                with turns.turn(number):
                    self._hand_over(lane, item, made)
            except BaseException as error:
                lane.rows.end(error)
                return

    def _hand_over(self, lane: _Lane, item: OpenedUnit | Part | _End, made: OpenedUnit | RowBatch | _End) -> None:
        """Hand over a prepared item: rows only when all parts of a call are ready, and nothing after an error."""
        if isinstance(made, RowBatch):
            lane.parts.append(made)
            if isinstance(item, Part) and not item.ends:
                return
        parts, lane.parts = lane.parts, []
        for rows in joined(parts) if not lane.has_ended else ():
            lane.rows.put(rows, rows.nbytes)
        if isinstance(made, OpenedUnit):
            lane.rows.put(made, self.reading.limit // _MOST_AHEAD)
        elif isinstance(made, _End) and not lane.has_ended:
            lane.has_ended = True
            lane.rows.end(made.error)

    def _take(self, lane: _Lane) -> Any:
        """Take the opened unit, and then its batches, or None at their end; meanwhile hand over results of calls."""
        applier = self.task.applier
        while applier.finish_ended() and not lane.rows.is_ready(_LOOK_SECONDS):
            pass
        try:
            return self.task.waits.take(lane.rows, self.starved if self.preprocessing else time.monotonic)
        except BaseException as error:
            if is_failure(error):
                applier.finish()  # hand over the rows before those that could not be read
            raise

    def _put(self, lane: _Lane, step: StepResult, is_last: bool) -> None:
        with self.task.waits.for_writing():
            lane.steps.put(step, step.values.nbytes, wait=not is_last)
            if step.unkept is not None and not is_last:
                self.acknowledged.wait(step.unkept)
        rows = min(len(step.values), lane.left)
        lane.left -= rows
        if self.pace.is_nearly_done(rows) and self.more is not None and self.error is None:
            self._ask()

    def _end_steps(self, lane: _Lane, error: BaseException | None, unkept: Unkept, speed: UdfSpeed) -> None:
        # Update `last` in place: if the unit was already staged, the checkpoint writer may have acknowledged it by now.
        lane.last.since, lane.last.rows = unkept.since, unkept.rows
        lane.speed = speed
        lane.steps.end(error)
        self.pace.left -= lane.left  # those that were not due, or are in checkpoints
        if error is None or isinstance(error, (StillWaiting, UnreadableFragment)):
            with self.task.waits.for_writing():
                self.acknowledged.wait(lane.last)

    def _keep(self) -> None:
        task, most = self.task, self.task.applier.sizer.most
        target = task.target
        while (lane := self.to_keep.get()) is not None:
            assert lane.opened is not None
            fragment = lane.unit.task
            checkpoints = CheckpointWriter(
                target.store, target.job, target.spec, fragment, self.acknowledged.kept, task.names, most
            )
            try:
                try:
                    report = lane.opened.keep(lane.steps, checkpoints)
                except StillWaiting as still:
                    report = UnitReport(False, waiting=still.batches)
                except UnreadableFragment as damaged:
                    report = UnitReport(False, unreadable=(str(damaged),))
                task.delayed.write_if_due(most)
                if report is None:
                    self.again.append(lane.unit)
                report = report or UnitReport(False)
                staged_now = report.staged and lane.opened.staged is None
                lane.report = replace(report, speed=replace(lane.speed, fragments=int(staged_now)))
                lane.opened = None
                self.on_kept(report, lane.unit)
                self.acknowledged.kept(lane.last)
            except BaseException as error:
                self.error = self.error or error
                self.keeping.stop(error)
                self._stop_reading(error)
