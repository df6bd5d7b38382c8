"""The demo does what it says, and says so when it does not."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lance
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from airflow_geneva import connect
from dags_examples.demo.__main__ import InUse, claim, run_demo
from dags_examples.demo.report import nearest
from dags_examples.demo.rest import AirflowApi, TaskState
from dags_examples.demo.runs import Run, RunFollower, Target, wait_for_dag
from dags_examples.demo.stack import AirflowStopped, DemoHome, airflow_environment, run_airflow
from dags_examples.demo.upkeep import DemoRuns
from dags_examples.demo.verses import COLUMN, VIEW, WORDY, append_books, count_wordy, create_verses, read_books

ROOT = Path(__file__).parents[2]
embeds = pytest.mark.skipif(np.__version__ < "2", reason="the wordllama for NumPy 1 downloads its tokenizer")
DAGS = ROOT / "dags_examples"


@pytest.fixture(autouse=True)
def _udfs_as_airflow_imports_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DAGS))


@pytest.fixture(scope="module")
def books() -> list[pa.Table]:
    return read_books()


@pytest.fixture
def home(tmp_path: Path) -> DemoHome:
    made = DemoHome(tmp_path / "demo")
    made.root.mkdir()
    return made


def finished(name: str = "run 1", **changes: Any) -> Run:
    """A run in which 10 rows were computed, 5 were skipped, and everything agrees."""
    tasks = [TaskState(f"backfill.{step}", -1, "success", 1, 1.5) for step in ("plan", "finish")]
    tasks += [TaskState(f"backfill.shards.{step}", 0, "success", 1, 2.0) for step in ("apply", "commit")]
    result = {"state": "DONE", "rows_computed": 10, "rows_skipped": 5, "rows_left": 0}
    return replace(Run(name, "success", tuple(tasks), result, 10, (3, 4), 9.0), **changes)


def with_result(**changes: Any) -> Mapping[str, Any]:
    return {**finished().result, **changes}


def test_the_text_is_whole_and_in_order(books: list[pa.Table]) -> None:
    assert len(books) == 66
    assert sum(book.num_rows for book in books) == 31_102
    first, last = books[0].to_pylist()[0], books[-1].to_pylist()[-1]
    assert first == {
        "book": "Genesis",
        "chapter": 1,
        "verse": 1,
        "text": "In the beginning God created the heaven and the earth.",
    }
    assert (last["book"], last["chapter"], last["verse"]) == ("Revelation", 22, 21)
    assert all(text and not text[0].isdigit() for book in books for text in book["text"].to_pylist())


def test_books_come_in_one_commit_with_one_fragment_each(home: DemoHome, books: list[pa.Table]) -> None:
    table = create_verses(connect(home.database), books[-6:-2])
    before = table.version
    append_books(table, books[-2:])
    assert table.version == before + 1
    fragments = table.lance.get_fragments()
    assert [fragment.count_rows() for fragment in fragments] == [book.num_rows for book in books[-6:]]
    assert table.to_arrow()["text"].to_pylist() == [text for book in books[-6:] for text in book["text"].to_pylist()]


@embeds
def test_an_embedding_does_not_depend_on_the_batch_it_was_computed_in(books: list[pa.Table]) -> None:
    from embedding_udfs import embed

    text = books[-2]["text"].combine_chunks()
    whole = embed(text)
    assert (len(whole), whole.type) == (len(text), embed.data_type)
    for start in range(0, len(text), 7):
        assert embed(text[start : start + 7]) == whole[start : start + 7]


@embeds
def test_the_counting_udfs_give_the_examples_values_and_count_across_processes(
    home: DemoHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    from embedding_udfs import embed
    from embedding_udfs.counted import COUNTS, counted_embed, counted_words

    home.counts.mkdir()
    monkeypatch.setenv(COUNTS, str(home.counts))
    embedded, worded = (
        Target("any", "any", connect(home.database), "any", home.counts / f"{udf}.txt")
        for udf in ("counted_embed", "counted_words")
    )
    assert (embedded.counted, worded.counted) == (0, 0)
    text = pa.array(["one", "two", "three"])
    assert counted_embed(text) == embed(text)
    assert counted_words(pa.array(["one", "", " two  three "])).to_pylist() == [1, 0, 2]
    program = (
        "import pyarrow as pa; from embedding_udfs.counted import counted_embed; counted_embed(pa.array(['four']))"
    )
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(DAGS)}, check=True)
    assert (embedded.counted, worded.counted) == (4, 3)


def test_a_change_of_the_example_is_a_change_of_the_counting_udf(tmp_path: Path) -> None:
    """Else the demo would go on with values of code that is no more."""
    package = tmp_path / "embedding_udfs"
    package.mkdir()
    (package / "counted.py").write_text((DAGS / "embedding_udfs" / "counted.py").read_text())
    example = (DAGS / "embedding_udfs" / "__init__.py").read_text()
    program = "from embedding_udfs.counted import counted_embed; print(counted_embed.code_version)"
    versions = []
    for text in (example, example.replace("dimensions=256", "dimensions=128")):
        (package / "__init__.py").write_text(text)
        told = subprocess.run(
            [sys.executable, "-B", "-c", program],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            check=True,
            capture_output=True,
            text=True,
        )
        versions.append(told.stdout)
    assert versions[0] != versions[1]


def test_a_run_that_agrees_has_no_problems() -> None:
    assert finished().problems(computed=10, skipped=5) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"counted": 11}, "the UDF counted 11 rows, reported are 10"),
        ({"state": "failed", "result": {}}, "the DAG run ended as failed"),
        ({"result": with_result(state="PARTIAL")}, "state = PARTIAL, expected DONE"),
        ({"result": with_result(rows_computed=9), "counted": 9}, "rows_computed = 9, expected 10"),
        ({"result": with_result(rows_skipped=6)}, "rows_skipped = 6, expected 5"),
        ({"result": with_result(rows_left=1)}, "rows_left = 1, expected 0"),
        ({"result": {}}, "rows_computed = None, expected 10"),
    ],
)
def test_a_run_that_does_not_agree_is_a_problem(changes: dict[str, Any], said: str) -> None:
    assert any(said in problem for problem in finished(**changes).problems(computed=10, skipped=5))


def test_spark_and_a_version_for_nothing_are_problems() -> None:
    result = with_result(rows_computed=0, rows_skipped=15)
    idle = finished(result=result, counted=0, versions=(4, 4), tasks=finished().tasks[:2])
    assert idle.problems(computed=0, skipped=15) == []
    assert "Spark was started" in replace(idle, tasks=finished().tasks).problems(0, 15)[0]
    assert "from version 4 to 5" in replace(idle, versions=(4, 5)).problems(0, 15)[0]


def test_wordy_verses_are_counted_in_the_text() -> None:
    book = pa.table({"text": ["a" * WORDY, "b" * (WORDY + 1), "word " * WORDY]})
    assert count_wordy([book, book]) == (4, 2 * (1 + WORDY))


def test_two_demos_do_not_share_a_folder(home: DemoHome) -> None:
    with claim(home), pytest.raises(InUse, match="End it first"), claim(home):
        pytest.fail("both hold it")
    with claim(home):
        pass


def test_nothing_of_the_users_own_airflow_or_spark_reaches_the_demo(
    home: DemoHome, monkeypatch: pytest.MonkeyPatch, java_home: str
) -> None:
    for name in ("AIRFLOW__CORE__EXECUTOR", "AIRFLOW_CONN_LANCE_DEFAULT", "SPARK_HOME", "PYSPARK_PYTHON"):
        monkeypatch.setenv(name, "the user's")
    environment = airflow_environment(home, DAGS, 1, {"COUNTS": "here"})
    assert environment["COUNTS"] == "here"
    assert "the user's" not in environment.values()
    assert environment["AIRFLOW_HOME"].startswith(str(home.root))


@pytest.mark.airflow
@pytest.mark.slow
def test_an_airflow_that_does_not_start_is_told_with_the_reason(home: DemoHome) -> None:
    home.airflow.mkdir()
    (home.airflow / "airflow.cfg").write_text("[database]\nsql_alchemy_conn = sqlite:////nowhere/airflow.db\n")
    with pytest.raises(AirflowStopped, match="unable to open database file"), run_airflow(home, DAGS, {}):
        pytest.fail("it cannot be up")
    assert mentioning(home) == []


LOADING = """
from airflow.sdk import DAG

from airflow_geneva.task_groups import LoadColumnsTaskGroup

with DAG("load", schedule=None):
    LoadColumnsTaskGroup(table="docs", source={source!r}, on="id", database={database!r}, inline_below_rows=1000)
"""


@pytest.mark.core
@pytest.mark.airflow
@pytest.mark.spark
@pytest.mark.slow
def test_the_demo_computes_everything_then_nothing_then_what_is_new_and_its_view_follows(
    home: DemoHome, books: list[pa.Table], new_airflow_db: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Airflow runs a DAG of the third task group as well: starting another one takes a minute."""
    # Airflow reads each file of its DAGs folder in a process of its own, and the demo runs two of 17.
    dags = tmp_path / "dags"
    shutil.copytree(DAGS / "embedding_udfs", dags / "embedding_udfs")
    for name in (".airflowignore", "backfill_embeddings.py", "refresh_wordy_verses.py"):
        shutil.copy(DAGS / name, dags)
    loaded = connect(tmp_path / "db").create_table("docs", pa.table({"id": range(10)}), max_rows_per_file=5)
    source, captions = tmp_path / "delivery.parquet", [f"page {row}" for row in range(10)]
    pq.write_table(pa.table({"id": range(10), "caption": captions}), source)
    (dags / "load_captions.py").write_text(LOADING.format(source=str(source), database=str(tmp_path / "db")))
    runs: list[Run] = []

    class RunsAndLoad(DemoRuns):
        def run(self, api: AirflowApi, name: str, new: Sequence[pa.Table]) -> list[str]:
            problems = super().run(api, name, new)
            if not new and not problems:
                wait_for_dag(api, "load")
                load = Target("load", "load", connect(tmp_path / "db"), "docs", home.counts / "none.txt")
                follower = RunFollower(api, load, self.console)
                api.trigger("load")
                runs.append(follower.follow("load"))
            return problems

    monkeypatch.setattr("dags_examples.demo.__main__.DAGS", dags)
    monkeypatch.setattr("dags_examples.demo.__main__.DemoRuns", RunsAndLoad)
    monkeypatch.setattr("dags_examples.demo.stack._migrate", lambda home, _: copy_database(new_airflow_db, home))
    said = io.StringIO()
    (home.root / "left over").mkdir()
    problems = run_demo(home, books[-8:], 2, "tears wiped away", Console(file=said, width=120))
    text = said.getvalue()
    assert problems == [], text
    assert [(run.state, run.result["state"]) for run in runs] == [("success", "DONE")]
    assert loaded.to_arrow()["caption"].to_pylist() == captions
    computed, late = sum(book.num_rows for book in books[-8:-2]), sum(book.num_rows for book in books[-2:])
    assert f"{computed:,} rows computed, 0 skipped; the UDF itself counted {computed:,}." in text
    assert f"0 rows computed, {computed:,} skipped; the UDF itself counted 0." in text
    assert f"{late:,} rows computed, {computed:,} skipped; the UDF itself counted {late:,}." in text
    assert f"{computed:,} of {computed:,} rows computed (100 %)" in text
    # What a slow machine takes to load the model is told apart; a busy one may compute the small job on Spark, too.
    estimate = rf"about [\d.,]+ s for {late:,} rows(?: besides [\d.,]+ s of loading)?, by an earlier job"
    rest = rf"[\d,]+ of {late:,} rows took [\d.]+ s in this process, and the others would take about [\d,]+ s"
    small = rf"computed (by this task: {estimate}|on Spark: ({estimate}; inline_below_seconds is 10|{rest}))"
    assert re.search(small, " ".join(text.split())), text
    assert "Revelation 21:4" in text
    wordy, more = count_wordy(books[-8:-2])[0], count_wordy(books[-2:])[0]
    assert f"{wordy:,} rows computed, {computed - wordy:,} skipped; the UDF itself counted {wordy:,}." in text
    assert f"{more:,} rows computed, {computed + late - more:,} skipped; the UDF itself counted {more:,}." in text
    assert f"{wordy:,} rows computed in this task" in text

    from embedding_udfs import embed

    table = connect(home.database).open_table("verses")
    stored = table.to_arrow()
    assert stored[COLUMN].combine_chunks() == embed(stored["text"].combine_chunks())
    assert nearest(table, stored["text"][0].as_py(), 1)["_distance"][0].as_py() == pytest.approx(0, abs=1e-6)
    committed = [table.lance.read_transaction(version).operation for version in (4, 6)]
    assert table.version == 6
    assert all(isinstance(operation, lance.LanceOperation.DataReplacement) for operation in committed)
    expected = [
        {**verse, "words": len(verse["text"].split())} for verse in stored.to_pylist() if len(verse["text"]) > WORDY
    ]
    for verse in expected:
        verse["place"] = f"{verse.pop('book')} {verse.pop('chapter')}:{verse.pop('verse')}"
    assert connect(home.database).open_table(VIEW).to_arrow().to_pylist() == [
        {name: verse[name] for name in ("place", "text", COLUMN, "words")} for verse in expected
    ]
    assert not (home.root / "left over").exists()
    assert mentioning(home) == []


def copy_database(new: Path, home: DemoHome) -> None:
    """Airflow's own command made it for all tests."""
    shutil.copyfile(new, home.airflow / "airflow.db")


# In the place of Airflow: what a component starts, and what of it does not end with the component.
COMPONENT = """
import signal, subprocess, sys, time
from pathlib import Path

depth = int(sys.argv[2]) if len(sys.argv) > 2 else 3
if depth < 3:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if depth:
    # A task has a session of its own, and so has the JVM below it.
    subprocess.Popen([sys.executable, "-m", "airflow", sys.argv[1], str(depth - 1)], start_new_session=True)
else:
    Path(f"all of {sys.argv[1]}").touch()
time.sleep(600)
"""

STOPPED = """
import signal, sys, time
from pathlib import Path
from dags_examples.demo import stack

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts the tests in the background ignores it
stack.COMPONENTS = {"api-server": [], "scheduler": []}
stack.STOP_SECONDS = 1
stack._migrate = lambda home, environment: None
stack._wait_until_healthy = lambda airflow: None
with stack.run_airflow(stack.DemoHome(Path(sys.argv[1])), Path(), {}) as airflow:
    airflow.wait()
"""


def test_a_demo_that_is_stopped_leaves_no_process(tmp_path: Path, java_home: str) -> None:
    """It is stopped while a task runs: Airflow, the task and what it has started are all there."""
    (tmp_path / "airflow").mkdir()
    (tmp_path / "airflow" / "__init__.py").touch()
    (tmp_path / "airflow" / "__main__.py").write_text(COMPONENT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    demo = subprocess.Popen(
        [sys.executable, "-c", STOPPED, str(tmp_path / "home")], cwd=tmp_path, env=environment, stderr=subprocess.PIPE
    )
    while demo.poll() is None and len(list(tmp_path.glob("all of *"))) < 2:
        time.sleep(0.1)
    family = psutil.Process(demo.pid).children(recursive=True)
    demo.send_signal(signal.SIGINT)
    _, told = demo.communicate(timeout=120)
    assert b"KeyboardInterrupt" in told
    assert len(family) == 8
    assert [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE] == []


def mentioning(home: DemoHome) -> list[list[str]]:
    """Command lines of running processes that have to do with the folder, this one's aside."""
    found = []
    for process in psutil.process_iter():
        try:
            line = process.cmdline()
            folder = process.environ().get("AIRFLOW_HOME", "")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if process.pid != os.getpid() and (str(home.root) in " ".join(line) or str(home.root) in folder):
            found.append(line)
    return found
