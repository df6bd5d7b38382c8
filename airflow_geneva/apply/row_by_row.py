"""Map a batch with a scalar UDF in a child, whatever becomes of the child."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator

from airflow_geneva.apply.outcome import Mapped, Trouble
from airflow_geneva.apply.policy import deciding, pause_before
from airflow_geneva.apply.settlement import Settlement
from airflow_geneva.apply.supervisor import Chunk, Lost
from airflow_geneva.on_error import Retry, Skip

_Range = tuple[int, int]
_Open = tuple[int, Trouble]


class RowByRow:
    """Settles the rows of a batch from the first to the last.

    A row that takes too long has failed. A row at which the child dies is called once more, alone in a new child,
    because the memory may have been used up by others; if that one dies too, the row has failed. A `Retry` comes on top
    of that. Rows whose values were on their way when a child died are called again. A child that dies between two calls
    accuses no row: the rest is cut in half until one row is left, and that row is treated as called.

    Args:
        settlement: the batch.
        order: has a child map rows, and ends early at a row that is to be decided here.
        explain: what a lost child means for a row.
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
        """Settle all rows; `UdfError` at the first one that fails the job."""
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
        """Keep what is settled, and give the rows that are not."""
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
