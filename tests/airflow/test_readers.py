"""Reader processes: what touches tables runs there, and what ends one ends nothing else."""

from __future__ import annotations

import ast
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from airflow_geneva.errors import GenevaError, StorageError
from airflow_geneva.pages import readers
from airflow_geneva.pages.readers import ReaderLost, Readers
from tests.support import within_reader
from tests.support.within_reader import Everybody

pytestmark = pytest.mark.airflow


@pytest.fixture(scope="module")
def shared() -> Iterator[Readers]:
    made = Readers()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def few() -> Iterator[Readers]:
    """A reader that tests may end; the next one starts another."""
    made = Readers(1)
    yield made
    made.stop()


def test_two_readers_start_when_they_are_needed_and_a_key_has_its_own(shared: Readers) -> None:
    ask = Everybody()
    found = [shared.read(ask, key, within_reader.own_process) for key in range(8)]
    assert os.getpid() not in found
    assert len(set(found)) == 2
    assert [shared.read(ask, key, within_reader.own_process) for key in range(8)] == found


def test_a_reader_holds_neither_airflow_nor_its_secrets(shared: Readers, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shared.read(Everybody(), 0, within_reader.loaded, "lance", "airflow", "fastapi", "pyspark") == ["lance"]
    monkeypatch.setenv("AIRFLOW__CORE__FERNET_KEY", "a-secret")
    monkeypatch.setenv("AIRFLOW_CONN_SHELF", "a-secret")
    own = Readers(1)
    try:
        assert "a-secret" not in str(own.read(Everybody(), 0, within_reader.environment))
        [child] = [one for one in psutil.Process().children() if one.pid == own.read(Everybody(), 0, os.getpid)]
        assert len(child.cmdline()) == 5
    finally:
        own.stop()


def test_the_server_is_asked_about_rights_once_for_each_question(shared: Readers) -> None:
    asked: list[str] = []

    class Some(Everybody):
        def may_see_table(self, conn_id: str, table: str) -> bool:
            asked.append(table)
            return table == "docs"

    user = Some()
    assert shared.read(user, 0, within_reader.may_see, user, "docs", "other", "docs") == [True, False, True]
    assert asked == ["docs", "other"]


def test_a_right_that_airflow_cannot_tell_is_the_error_of_its_request(shared: Readers) -> None:
    class Broken(Everybody):
        def may_see_table(self, conn_id: str, table: str) -> bool:
            raise LookupError("Airflow's database is away")

    user = Broken()
    with pytest.raises(LookupError, match="is away"):
        shared.read(user, 0, within_reader.may_see, user, "docs")
    assert shared.read(user, 0, within_reader.loaded, "lance") == ["lance"]


def test_errors_are_those_of_the_call(shared: Readers) -> None:
    ask = Everybody()
    with pytest.raises(LookupError, match="not here") as found:
        shared.read(ask, 0, within_reader.fail)
    assert "within_reader.py" in str(found.value.__cause__)
    with pytest.raises(GenevaError, match="Local: cannot be pickled"):
        shared.read(ask, 0, within_reader.fail_oddly)
    with pytest.raises(StorageError, match="called `Option::unwrap"):
        shared.read(ask, 0, within_reader.panic)
    with pytest.raises(GenevaError, match=r"takes 100,000,\d+ bytes"):
        shared.read(ask, 0, within_reader.much)


def test_a_timeout_of_the_call_itself_is_its_error_and_loses_no_reader(few: Readers) -> None:
    ask = Everybody()
    before = few.read(ask, 0, within_reader.own_process)
    with pytest.raises(TimeoutError, match="the store is away"):
        few.read(ask, 0, within_reader.time_out)
    assert few.read(ask, 0, within_reader.own_process) == before


def test_a_call_that_exits_ends_neither_its_reader_nor_a_thread_of_the_server(few: Readers) -> None:
    ask = Everybody()
    before = few.read(ask, 0, within_reader.own_process)
    with pytest.raises(GenevaError, match="SystemExit: 3"):
        few.read(ask, 0, sys.exit, 3)
    assert few.read(ask, 0, within_reader.own_process) == before


def test_a_question_that_outlives_its_request_ends_no_reader(few: Readers) -> None:
    class Slow(Everybody):
        def may_see_table(self, conn_id: str, table: str) -> bool:
            time.sleep(0.3)
            return True

    user = Slow()
    before = few.read(user, 0, within_reader.own_process)
    few.read(user, 0, within_reader.ask_in_background, user)
    time.sleep(0.5)
    assert few.read(user, 0, within_reader.own_process) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_of_the_server_leaves_the_answer_to_the_server(few: Readers, number: int) -> None:
    """Of Ctrl-C in a terminal, or of systemd: the server answers what it has begun, then it ends, and its readers."""
    ask = Everybody()
    before = few.read(ask, 0, within_reader.own_process)
    os.kill(before, number)
    assert few.read(ask, 0, within_reader.loaded, "lance") == ["lance"]
    assert few.read(ask, 0, within_reader.own_process) == before


def test_an_innocent_request_is_made_again_when_its_reader_ends(few: Readers, tmp_path: Path) -> None:
    """Alone in its reader, which something else ends: the system, or a count that an earlier request left behind."""
    ask = Everybody()
    pid = few.read(ask, 0, within_reader.own_process)
    with ThreadPoolExecutor(1) as pool:
        good = pool.submit(few.read, ask, 0, within_reader.wait_and_say, str(tmp_path), "good")
        until = time.monotonic() + 60
        while not (tmp_path / "good.waits").exists():
            assert time.monotonic() < until
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        (tmp_path / "go").touch()
        assert good.result() == "good"


_FORKING = """
import os, sys, threading
from airflow_geneva.pages import readers
from tests.support.within_reader import Everybody, own_process
ask = Everybody()
first = readers.read(ask, 0, own_process)
with readers.READING._lock:  # as another thread may, at the moment of the fork
    pid = os.fork()
    if not pid:
        threading.Timer(100, os._exit, (9,)).start()
        second = readers.read(ask, 0, own_process)
        os._exit(0 if second != first else 8)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_server_that_forks_after_it_has_read_gives_each_process_its_own_readers() -> None:
    assert subprocess.run([sys.executable, "-c", _FORKING], timeout=120, check=False).returncode == 0


def test_a_count_that_uses_all_cores_has_time(few: Readers) -> None:
    assert few.read(Everybody(), 0, resource.getrlimit, resource.RLIMIT_CPU)[0] >= 60 * (os.cpu_count() or 1)


ENDS: dict[str, tuple[Any, tuple[Any, ...], str]] = {
    "it exits": (within_reader.die, (3,), "exited with code 3"),
    "a signal": (os.abort, (), "signal 6"),
    "memory of Python": (within_reader.eat, (), "bytes of memory"),
    "memory of Arrow": (within_reader.eat_natively, (), "bytes of memory"),
    "time of the CPU": (within_reader.limit_and_burn, (), "CPU time"),
    "time": (time.sleep, (3_600,), "longer than 2 seconds"),
}


@pytest.mark.parametrize(("call", "arguments", "reason"), ENDS.values(), ids=ENDS)
def test_what_ends_a_reader_is_an_error_with_an_id_that_the_log_has(
    few: Readers,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: Any,
    arguments: tuple[Any, ...],
    reason: str,
) -> None:
    ask = Everybody()
    before = few.read(ask, 0, within_reader.own_process)
    if "longer" in reason:
        monkeypatch.setattr(readers, "ANSWER_SECONDS", 2.0)
    with caplog.at_level(logging.ERROR), pytest.raises(ReaderLost, match=reason) as lost:
        few.read(ask, 0, call, *arguments)
    told = str(lost.value).rpartition("id ")[2].rstrip(".")
    assert len(told) == 8
    assert told in caplog.text
    until = time.monotonic() + 60
    while psutil.pid_exists(before) and psutil.Process(before).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.05)
    monkeypatch.undo()
    assert few.read(ask, 0, within_reader.own_process) != before


def test_requests_beside_one_that_ends_their_reader_are_answered(few: Readers, tmp_path: Path) -> None:
    ask, words = Everybody(), [f"good-{number}" for number in range(4)]
    with ThreadPoolExecutor(8) as pool:
        good = [pool.submit(few.read, ask, 0, within_reader.wait_and_say, str(tmp_path), word) for word in words]
        until = time.monotonic() + 120
        while len(list(tmp_path.glob("*.waits"))) < len(words):
            assert time.monotonic() < until
            time.sleep(0.01)
        bad = pool.submit(few.read, ask, 0, within_reader.die, 9)
        time.sleep(0.1)
        (tmp_path / "go").touch()
        with pytest.raises(ReaderLost, match="code 9"):
            bad.result()
        assert [one.result() for one in good] == words


def test_a_reader_that_takes_too_long_answers_its_other_requests(
    few: Readers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ask = Everybody()
    few.read(ask, 0, within_reader.own_process)
    with ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(readers, "ANSWER_SECONDS", 1.0)
        late = pool.submit(few.read, ask, 0, time.sleep, 3_600)
        time.sleep(0.5)
        monkeypatch.setattr(readers, "ANSWER_SECONDS", 120.0)
        good = pool.submit(few.read, ask, 0, within_reader.wait_and_say, str(tmp_path), "good")
        with pytest.raises(ReaderLost):
            late.result()
        (tmp_path / "go").touch()
        assert good.result() == "good"


_SERVER = """
import sys, time
from airflow_geneva.pages.readers import read
from tests.support.within_reader import Everybody, own_process
print(read(Everybody(), 0, own_process), "lance" in sys.modules, flush=True)
time.sleep(3600)
"""


def test_readers_end_with_their_server_which_loads_no_lance() -> None:
    server = subprocess.Popen([sys.executable, "-c", _SERVER], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    pid, loaded = server.stdout.readline().split()
    server.kill()
    server.wait()
    assert loaded == "False"
    until = time.monotonic() + 60
    while psutil.pid_exists(int(pid)) and psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_many_threads_ask_at_once(shared: Readers) -> None:
    before = threading.active_count()
    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(shared.read, Everybody(), number, within_reader.loaded, "lance") for number in range(200)]
        assert all(one.result() == ["lance"] for one in asked)
    assert threading.active_count() <= before + 2


# Modules of the pages that run in readers; `visible.py` runs in both, and only a reader calls what reads a store.
OF_READERS = {"databases.py", "graph.py", "jobs.py", "namespace_reads.py", "reader.py", "runs.py", "tables.py"}
READS = {"open_table", "open_view", "table_names", "has_table", "reach", "query", "lance", "jobs", "job"}


def test_modules_of_the_server_call_nothing_that_reads_a_table() -> None:
    wrong = []
    for file in sorted(Path(readers.__file__).parent.glob("*.py")):
        if file.name in OF_READERS | {"visible.py"}:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READS:
                wrong.append(f"{file.name} line {node.lineno}: {ast.unparse(node)}")
    assert wrong == []


_AIRFLOW = re.compile(r"airflow(\.|$)|fastapi|airflow_geneva\.(hooks|operators|pages\.(access|app))")


def test_modules_of_readers_import_no_airflow() -> None:
    wrong = []
    for name in (*OF_READERS, "visible.py"):
        tree = ast.parse(Path(readers.__file__).with_name(name).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            found = node.module if isinstance(node, ast.ImportFrom) else None
            if found and re.match(
                r"airflow(\.|$)|fastapi|airflow_geneva\.(hooks|operators|pages\.(access|app))", found
            ):
                wrong.append(f"{name}: {found}")
    assert wrong == []
