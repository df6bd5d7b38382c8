"""Run the demo's two DAGs: a backfill of the column, and the refresh of the view that its event triggers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
from rich.console import Console

from airflow_geneva import Database
from dags_examples.demo.rest import AirflowApi
from dags_examples.demo.runs import Run, RunFollower, Target
from dags_examples.demo.verses import TABLE, VIEW, WORDY, count_wordy

BACKFILL, REFRESH = "backfill_embeddings", "refresh_wordy_verses"


class DemoRuns:
    """Runs the backfill, waits for the refresh, and checks both against the text.

    Args:
        database: has the table; the refresh creates the view.
        counts: the folder in which each UDF counts its rows.
    """

    def __init__(self, database: Database, counts: Path, console: Console) -> None:
        self.database = database
        self.console = console
        self.backfill = Target(BACKFILL, "backfill", database, TABLE, counts / "counted_embed.txt")
        self.refresh = Target(REFRESH, "refresh", database, VIEW, counts / "counted_words.txt")
        self.backfills: list[Run] = []
        self.refreshes: list[Run] = []
        self._books: list[pa.Table] = []

    def run(self, api: AirflowApi, name: str, new: Sequence[pa.Table]) -> list[str]:
        """Backfill once; return the problems.

        Args:
            name: name for display.
            new: the books that are not computed yet; without new books there is no event and no refresh.
        """
        backfill, refresh = (RunFollower(api, target, self.console) for target in (self.backfill, self.refresh))
        api.trigger(BACKFILL)
        self.backfills.append(backfill.follow(name))
        problems = self._check(self.backfills[-1], sum(book.num_rows for book in new))
        if problems or not new:
            return problems
        self.console.rule(f"after {name}: its event sets off the DAG {REFRESH}", align="left")
        self.refreshes.append(refresh.follow(f"after {name}"))
        self._books += new
        problems = self._check(self.refreshes[-1], count_wordy(new)[0]) or self._check_view()
        if (ran := len(api.runs(REFRESH))) != len(self.refreshes):
            problems.append(f"{REFRESH} ran {ran} times, and {len(self.refreshes)} backfills changed rows.")
        return problems

    def _check(self, run: Run, computed: int) -> list[str]:
        total = self.database.open_table(TABLE).count_rows()
        problems = run.problems(computed=computed, skipped=total - computed)
        if not problems:
            self.console.print(
                f"{run.result['rows_computed']:,} rows computed, {run.result['rows_skipped']:,} skipped; "
                f"the UDF itself counted {run.counted:,}."
            )
        return problems

    def _check_view(self) -> list[str]:
        found = self.database.open_table(VIEW).to_arrow()
        rows, words = found.num_rows, sum(found["words"].to_pylist())
        expected = count_wordy(self._books)
        if (rows, words) != expected:
            return [f"View {VIEW} has {rows} rows with {words} words, and not {expected[0]} with {expected[1]}."]
        self.console.print(
            f"View [bold]{VIEW}[/] has {rows:,} rows with {words:,} words: "
            f"just what the text has in verses of more than {WORDY} characters."
        )
        return []
