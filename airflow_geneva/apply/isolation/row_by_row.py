"""Map a batch with a scalar UDF in a worker process that may die at any row."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator

from airflow_geneva.apply.isolation.batch_state import Settlement
from airflow_geneva.apply.isolation.process import Chunk, Lost
from airflow_geneva.apply.outcome import Mapped, Trouble
from airflow_geneva.apply.policy import deciding, pause_before
from airflow_geneva.udf.error_policy import Retry, Skip

_Range = tuple[int, int]
_Open = tuple[int, Trouble]


class RowByRow:
    """Maps the rows of a batch in order.

    A row whose call exceeds the timeout has failed. If a worker dies during a row's call, the row runs once more, alone
    in a new worker, because other rows may have used up the memory; if that worker dies too, the row has failed.
    `Retry` rules apply in addition. Rows whose values were lost with a worker run again. If a worker dies between two
    calls, no row is to blame: the remaining rows are cut in half until one row is left, which counts as called.

    Args:
        order: maps rows in a worker; ends early at a row that this class has to decide about.
        explain: converts the loss of a worker to the failure of a row.
    """

    def __init__(
        self, settlement: Settlement, order: Callable[[int, int], Iterator[Chunk]], explain: Callable[[Lost], Trouble]
    ) -> None:
        self.settlement = settlement
        self.order = order
        self.explain = explain
        self.todo: list[_Range | _Open] = [(0, settlement.rows)]
        self.deaths: Counter[int] = Counter()
        self.tries: Counter[int] = Counter()

    def run(self) -> Mapped:
        """Map all rows; `UdfError` at the first row that fails the job."""
        while self.todo:
            start, rest = self.todo.pop()
            if isinstance(rest, Trouble):
                self._decide(start, rest)
            elif start < rest:
                self._map(start, rest)
        return self.settlement.mapped()

    def _map(self, start: int, stop: int) -> None:
        at = start
        opened: list[_Open] = []
        try:
            for chunk in self.order(start, stop):
                opened += self._take(chunk)
                at = chunk.stop
        except Lost as lost:
            self._bury(lost, at, stop, alone=stop - start == 1)
        else:
            self.todo.append((at, stop))
        self.todo += reversed(opened)

    def _take(self, chunk: Chunk) -> list[_Open]:
        """Keep the values and skipped rows of a chunk; return the rows that still need a decision."""
        settlement = self.settlement
        settlement.called(chunk.start, chunk.stop)
        at = chunk.start
        opened = []
        for row, trouble in chunk.troubles:
            first = trouble.fits[0] if trouble.fits else None
            if first is not None and isinstance(settlement.rules[first], Skip):
                settlement.give_up(row, first, trouble)
            else:
                opened.append((row, trouble))
                settlement.put(at, chunk.values.slice(at - chunk.start, row - at))
                at = row + 1
        settlement.put(at, chunk.values.slice(at - chunk.start))
        return opened

    def _decide(self, row: int, trouble: Trouble) -> None:
        self.tries[row] += 1
        at = deciding(self.settlement.rules, trouble.fits, self.tries[row])
        rule = None if at is None else self.settlement.rules[at]
        if isinstance(rule, Retry):
            time.sleep(pause_before(rule, self.tries[row]))
            self.todo.append((row, row + 1))
        elif at is not None and isinstance(rule, Skip):
            self.settlement.leave(row)
            self.settlement.give_up(row, at, trouble)
        else:
            raise self.settlement.failed(row, trouble)

    def _bury(self, lost: Lost, at: int, stop: int, alone: bool) -> None:
        row = lost.row
        if row is None or not at <= row < stop:
            if stop - at > 1:
                middle = (at + stop) // 2
                self.todo += [(middle, stop), (at, middle)]
                return
            row = at
        self.settlement.called(at, row + 1)
        self.todo.append((row + 1, stop))
        self.deaths[row] += not lost.timed_out
        if lost.timed_out or (alone and self.deaths[row] > 1):
            self.todo.append((row, self.explain(lost)))
        else:
            self.tries[row] += 1
            self.todo.append((row, row + 1))
        self.todo.append((at, row))
