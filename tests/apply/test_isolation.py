"""UDFs that raise, hang and crash: exactly the rows at fault fail, and all others have their values."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from airflow_geneva import UdfCrashed
from airflow_geneva.engine.apply.isolation.process import POOL, WorkerProcess
from airflow_geneva.engine.apply.isolation.runner import open_batch_mapper
from airflow_geneva.engine.apply.udf_call import MappedBatch
from airflow_geneva.engine.udf import UDF, load_udf, udf
from airflow_geneva.engine.udf.error_policy import Retry, Skip
from airflow_geneva.engine.udf.shipping import UdfReference
from airflow_geneva.errors import InvalidInput, UdfError
from tests.udfs_for_tests import failing
from tests.udfs_for_tests.failing import EXIT, KILL, OTHER, RAISE, SEGFAULT, SLEEP, WRONG

FORMS = [failing.scalar, failing.array, failing.record_batch]
NARROWED = FORMS[:2]  # one form is called a row at a time, one with halves of the batch
EXCEPTIONS = {
    RAISE: "tests.udfs_for_tests.failing.Unlucky",
    OTHER: "builtins.KeyError",
    WRONG: "airflow_geneva.errors.UdfError",
    SEGFAULT: "airflow_geneva.errors.UdfCrashed",
    EXIT: "airflow_geneva.errors.UdfCrashed",
    KILL: "airflow_geneva.errors.UdfCrashed",
    SLEEP: "builtins.TimeoutError",
}


@pytest.fixture(autouse=True, scope="module")
def _dismissed() -> Iterator[None]:
    yield
    dismiss()


def dismiss() -> None:
    for child in list(POOL.idle):
        child.close()


def run(function: UDF | UdfReference, values: Sequence[int | None], **columns: Sequence[Any]) -> MappedBatch:
    with open_batch_mapper(function) as mapper:
        return mapper(pa.record_batch({"x": pa.array(values, pa.int64()), **columns}))


def name_of(function: UDF) -> str:
    return function.name


def model(values: Sequence[int]) -> tuple[list[int | None], list[tuple[int, str]]]:
    """What mapping gives under "skip", said in plain Python."""
    failures = [(at, EXCEPTIONS[value]) for at, value in enumerate(values) if value < 0]
    return [None if value < 0 else value * 10 for value in values], failures


def assert_as_modelled(mapped: MappedBatch, values: Sequence[int]) -> None:
    expected, failures = model(values)
    assert mapped.values.type == pa.int64()
    assert mapped.values.to_pylist() == expected
    assert [(failure.index, failure.exception) for failure in mapped.failures] == failures
    assert mapped.rows_called >= len(values)
    assert all(failure.calls >= 1 for failure in mapped.failures)


# What runs in this process


def test_a_udf_without_a_policy_runs_in_this_process() -> None:
    before = len(POOL.idle)
    mapped = run(udf(data_type=pa.int64(), name="f")(lambda x: os.getpid()), [1, 2])
    assert mapped.values.to_pylist() == [os.getpid()] * 2
    assert (mapped.failures, mapped.rows_called, len(POOL.idle)) == ((), 2, before)


@pytest.mark.parametrize("values", [[1, 2, RAISE, 4, RAISE, 5], [RAISE], [1, 2, 3, 4, 5, OTHER], [RAISE] * 3])
def test_an_array_udf_that_raises_is_narrowed_down_to_the_first_row(values: list[int]) -> None:
    row = next(at for at, value in enumerate(values) if value < 0)
    with pytest.raises(UdfError, match=f"on row {row} of a batch of {len(values)}: ") as failed:
        run(failing.plain_array, values)
    assert failed.value.row_index == row
    assert failed.value.computed is not None
    assert failed.value.computed.to_pylist() == [value * 10 for value in values[:row]]
    assert str(failed.value).count("Traceback") == 1
    assert isinstance(failed.value.__cause__, failing.Unlucky if values[row] == RAISE else KeyError)


def test_an_output_of_the_wrong_type_is_no_matter_of_rows() -> None:
    with pytest.raises(UdfError, match="failed with type error") as failed:
        run(failing.plain_array, [1, WRONG, 3])
    assert failed.value.row_index is None


def test_a_call_that_fails_only_as_a_whole_fails_no_row(caplog: pytest.LogCaptureFixture) -> None:
    assert run(failing.sensitive, list(range(9))).values.to_pylist() == [10 * x for x in range(9)]
    assert "failed on a call of 9 rows (MemoryError: too many)" in caplog.text


@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_a_call_that_runs_out_of_device_memory_is_halved_and_the_process_learns_how_many_rows_fit(
    tmp_path: Path, policy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lengths = tmp_path / "lengths"

    def model(x: pa.Int64Array) -> pa.Int64Array:
        with open(lengths, "a") as file:
            file.write(f"{len(x)} ")
        if len(x) > 30 or 999 in x.to_pylist():
            raise RuntimeError("CUDA error: out of memory")
        return x

    function = udf(data_type=pa.int64(), name=f"model_{policy}", version="1", on_error=policy)(model)
    assert run(function, list(range(100))).values.to_pylist() == list(range(100))
    assert run(function, list(range(50))).values.to_pylist() == list(range(50))
    assert lengths.read_text().split() == ["100", "50", "25", "25", "50", "25", "25", "25", "25"]
    assert "ran out of its device's memory on a call of 50 rows (RuntimeError: CUDA error" in caplog.text
    if policy == "fail":
        with pytest.raises(UdfError, match="on row 1 of a batch of 2: CUDA error") as failed:
            run(function, [1, 999])
        assert failed.value.row_index == 1
    else:
        assert [failure.index for failure in run(function, [1, 999]).failures] == [1]
    lengths.unlink()
    assert run(function, list(range(50))).values.to_pylist() == list(range(50))
    assert lengths.read_text().split() == ["25", "25"], "a row that does not fit alone says nothing about others"


# Skipping


@pytest.mark.parametrize("function", FORMS, ids=name_of)
def test_rows_that_raise_or_give_something_wrong_are_skipped_and_no_others(function: UDF) -> None:
    values = [1, RAISE, 2, WRONG, OTHER, 3, 4]
    mapped = run(function, values)
    assert_as_modelled(mapped, values)
    raised, wrong, other = mapped.failures
    assert {failure.rule for failure in mapped.failures} == {0}
    assert raised.message == "no -1"
    assert 'raise Unlucky(f"no {what}")' in raised.traceback
    assert "airflow_geneva" not in raised.traceback
    assert "int64" in wrong.message
    assert wrong.traceback == ""
    assert "KeyError: -6" in other.traceback


@pytest.mark.parametrize("function", FORMS, ids=name_of)
def test_an_empty_batch_starts_nothing(function: UDF) -> None:
    before = psutil.Process().children()
    mapped = run(function, [])
    assert (len(mapped.values), mapped.values.type, mapped.failures, mapped.rows_called) == (0, pa.int64(), (), 0)
    assert len(psutil.Process().children()) <= len(before)


def test_null_is_a_value() -> None:
    function = udf(data_type=pa.int64(), name="f", on_error="skip")(lambda x: x)
    mapped = run(function, [None, 1, None])
    assert (mapped.values.to_pylist(), mapped.failures) == ([None, 1, None], ())


@pytest.mark.slow
def test_rows_that_all_fail_are_all_listed_in_order() -> None:
    mapped = run(failing.scalar, [RAISE] * 2_500)
    assert [failure.index for failure in mapped.failures] == list(range(2_500))
    assert (mapped.values.null_count, mapped.rows_called) == (2_500, 2_500)


def test_what_is_kept_of_an_exception_is_bounded_and_can_be_stored() -> None:
    (failure,) = run(failing.unspeakable, [1]).failures
    assert (len(failure.message), len(failure.traceback)) == (2_000, 8_000)
    assert pa.array([failure.message, failure.traceback]).type == pa.string()


# Lists of rules


def test_a_row_is_called_again_until_it_succeeds(tmp_path: Path) -> None:
    mapped = run(failing.scalar_listed, [1, 100, 2], marks=[str(tmp_path)] * 3)
    assert (mapped.values.to_pylist(), mapped.failures, mapped.rows_called) == ([10, 1_000, 20], (), 5)
    assert {file.name: len(file.read_text()) for file in tmp_path.iterdir()} == {"1": 1, "100": 3, "2": 1}


def test_a_row_whose_attempts_are_used_up_goes_to_the_next_rule(tmp_path: Path) -> None:
    mapped = run(failing.scalar_listed, [1, RAISE, 2], marks=[str(tmp_path)] * 3)
    assert mapped.values.to_pylist() == [10, None, 20]
    assert [(failure.index, failure.rule, failure.calls) for failure in mapped.failures] == [(1, 1, 3)]


def test_a_batch_is_called_again_as_a_whole_before_it_is_narrowed_down(tmp_path: Path) -> None:
    mapped = run(failing.array_listed, [1, 100, 2, 3], marks=[str(tmp_path)] * 4)
    assert (mapped.values.to_pylist(), mapped.rows_called) == ([10, 1_000, 20, 30], 12)
    mapped = run(failing.array_listed, [4, RAISE, 5, 6], marks=[str(tmp_path)] * 4)
    assert mapped.values.to_pylist() == [40, None, 50, 60]
    # Three times with all others, three times alone.
    assert [(failure.index, failure.rule, failure.calls) for failure in mapped.failures] == [(1, 1, 6)]


@pytest.mark.parametrize("function", [failing.scalar_listed, failing.array_listed], ids=name_of)
def test_fail_after_skip_fails_the_job_and_keeps_what_was_settled(function: UDF, tmp_path: Path) -> None:
    values = [1, RAISE, 2, OTHER, 3]
    with pytest.raises(
        UdfError, match="raised KeyError on row 3 of a batch of 5: -6\nInput batch schema: x: "
    ) as failed:
        run(function, values, marks=[str(tmp_path)] * 5)
    assert failed.value.row_index == 3
    assert failed.value.computed is not None
    assert failed.value.computed.to_pylist() == [10, None, 20]
    assert [failure.index for failure in failed.value.failures] == [1]
    assert "raise KeyError(what)" in str(failed.value)


def test_a_udf_error_with_failures_travels_as_a_pickle() -> None:
    error = UdfError("no", 3, pa.array([1]), run(failing.scalar, [RAISE]).failures)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.row_index, again.failures) == ("no", 3, ())


@pytest.mark.slow
def test_the_first_rule_that_fits_decides() -> None:
    with pytest.raises(UdfError, match="raised Unlucky on row 1") as failed:
        run(failing.fail_first, [1, RAISE])
    assert failed.value.row_index == 1
    mapped = run(failing.in_order, [RAISE, OTHER])
    assert [failure.rule for failure in mapped.failures] == [1, 0]


def test_an_exception_that_no_rule_fits_fails_the_job() -> None:
    with pytest.raises(UdfError, match="raised KeyError on row 2 of a batch of 4") as failed:
        run(failing.array_skips_some, [1, RAISE, OTHER, 2])
    assert [failure.index for failure in failed.value.failures] == [1]


def test_something_wrong_is_called_again_like_something_raised() -> None:
    mapped = run(failing.retried, [1, WRONG, 2, RAISE, 3])
    assert mapped.values.to_pylist() == [10, None, 20, None, 30]
    assert [(failure.index, failure.rule, failure.calls) for failure in mapped.failures] == [(1, 1, 2), (3, 1, 2)]


# Hanging and crashing


@pytest.mark.slow
@pytest.mark.parametrize("function", [failing.scalar_in_time, failing.array_in_time], ids=name_of)
def test_a_row_that_takes_too_long_is_skipped_and_no_other(function: UDF) -> None:
    values = [1, 2, SLEEP, 3]
    mapped = run(function, values)
    assert_as_modelled(mapped, values)
    assert mapped.failures[0].message == "The call took longer than 1 seconds and was killed."
    assert mapped.failures[0].traceback == ""


@pytest.mark.slow
def test_a_row_that_takes_too_long_fails_the_job_without_a_policy() -> None:
    with pytest.raises(UdfError, match="raised TimeoutError on row 1 of a batch of 3") as failed:
        run(failing.scalar_on_time, [1, SLEEP, 2])
    assert failed.value.computed is not None
    assert failed.value.computed.to_pylist() == [10]


@pytest.mark.slow
@pytest.mark.parametrize("function", NARROWED, ids=name_of)
def test_a_row_that_crashes_is_skipped_and_no_other(function: UDF) -> None:
    values = [*range(700), SEGFAULT, *range(300)]
    mapped = run(function, values)
    assert_as_modelled(mapped, values)
    (failure,) = mapped.failures
    assert failure.exception == f"{UdfCrashed.__module__}.{UdfCrashed.__qualname__}"
    assert (failure.message, failure.traceback) == ("The process that ran the call was killed by SIGSEGV.", "")


@pytest.mark.slow
@pytest.mark.parametrize("function", NARROWED, ids=name_of)
def test_rows_that_end_the_process_in_any_way_are_skipped(function: UDF) -> None:
    values = [EXIT, 1, 2, SEGFAULT, RAISE, 3, KILL]
    mapped = run(function, values)
    assert_as_modelled(mapped, values)
    crashes = [failure.message for failure in mapped.failures if failure.exception.endswith("UdfCrashed")]
    assert "ended with exit code 3." in crashes[0]
    assert "was killed by SIGKILL (out of memory?)." in crashes[2]


@pytest.mark.parametrize(
    ("deadly", "starts"),
    [
        # The first worker, one after each death, and a spare that stands by.
        ([EXIT, SEGFAULT, EXIT], 5),
        # Another process or the kernel may have killed the worker: the row runs once more, alone.
        ([KILL], 3),
    ],
)
def test_a_row_that_ends_its_worker_costs_one_start(
    monkeypatch: pytest.MonkeyPatch, deadly: list[int], starts: int
) -> None:
    POOL.dismiss()
    started, start = list[WorkerProcess](), WorkerProcess._start
    monkeypatch.setattr(WorkerProcess, "_start", lambda self, theirs: started.append(self) or start(self, theirs))
    values = [at for row in deadly for at in (1, row, 2)]
    mapped = run(failing.scalar, values)
    POOL.dismiss()
    assert_as_modelled(mapped, values)
    assert len(started) == starts


def test_the_worker_after_a_death_was_started_before_it() -> None:
    POOL.dismiss()
    with open_batch_mapper(failing.talkative) as mapper:
        (_, second) = mapper(pa.record_batch({"x": [EXIT, 1]})).values.to_pylist()
        for spare in list(POOL.spares.values()):
            spare.join()
        spares = {str(child.process.pid) for child in POOL.idle}
        (_, third) = mapper(pa.record_batch({"x": [EXIT, 2]})).values.to_pylist()
    assert spares == {third} - {second}


@pytest.mark.slow
def test_a_process_that_dies_by_chance_costs_no_row(tmp_path: Path) -> None:
    at_first = tmp_path / "died"
    function = udf(data_type=pa.int64(), name="f", on_error="skip")(_dies_once(str(at_first)))
    mapped = run(function, [1, 2, 3])
    assert at_first.exists()
    assert (mapped.values.to_pylist(), mapped.failures) == ([1, 2, 3], ())


def _dies_once(file: str) -> Callable[[int], int]:
    def f(x: int) -> int:
        if x == 2 and not os.path.exists(file):
            open(file, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    return f


@pytest.mark.slow
def test_values_that_were_sent_back_are_not_computed_again(tmp_path: Path) -> None:
    mapped = run(failing.slow_and_counted, [1, 2, EXIT, 3], marks=[str(tmp_path)] * 4)
    assert mapped.values.to_pylist() == [10, 20, None, 30]
    assert {file.name: len(file.read_text()) for file in tmp_path.iterdir()} == {"1": 1, "2": 1, "3": 1, str(EXIT): 1}
    assert mapped.rows_called == 4


def test_a_process_that_left_another_one_behind_is_missed_all_the_same() -> None:
    mapped = run(failing.leaves_a_process, [1])
    assert [failure.message for failure in mapped.failures] == ["The process that ran the call ended with exit code 1."]


@pytest.mark.parametrize(
    ("function", "said"), [(failing.NeverReady, "OSError.*no model"), (failing.DiesBeforeReady, "exit code 7")]
)
def test_a_udf_that_cannot_be_set_up_fails_the_job_whatever_its_policy(function: UDF, said: str) -> None:
    with pytest.raises(UdfError, match=f"could not be set up: .*{said}") as failed:
        run(function, [1, 2])
    assert failed.value.row_index is None


# Children


def test_a_udf_may_write_to_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    dismiss()
    assert run(failing.talkative, [1, 2]).failures == ()
    out, err = capfd.readouterr()
    assert out == ""
    assert "hello 1\n" in err
    assert "raw" in err


def test_a_child_imports_neither_lance_nor_spark_nor_airflow() -> None:
    found = set(run(failing.loaded_modules, [1]).values.to_pylist()[0].split(","))
    assert found <= {"", "pandas"}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is told which process to end first")
def test_of_a_machine_without_memory_the_kernel_takes_the_process_of_the_udf() -> None:
    (child,) = run(failing.talkative, [1]).values.to_pylist()
    scores = [int(Path(f"/proc/{process}/oom_score").read_text()) for process in (child, os.getpid())]
    assert scores[0] > scores[1] + 100


def test_a_child_and_what_it_has_set_up_are_used_again() -> None:
    udf_reference = UdfReference.of(failing.SetUpOnce)
    seen = {value for _ in range(3) for value in run(udf_reference, [1, 2]).values.to_pylist()}
    assert len(seen) == 1
    assert seen.pop() % 100 == 1


def test_a_child_is_not_used_again_where_the_environment_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    function = udf(data_type=pa.string(), name="f", on_error="skip")(lambda x: os.environ.get("GENEVA_TEST_WORD"))
    assert run(function, [1]).values.to_pylist() == [None]
    monkeypatch.setenv("GENEVA_TEST_WORD", "hello")
    assert run(function, [1]).values.to_pylist() == ["hello"]


def test_a_child_that_was_killed_while_it_had_nothing_to_do_is_replaced() -> None:
    (first,) = set(run(failing.talkative, [1]).values.to_pylist())
    os.kill(int(first), signal.SIGKILL)
    mapped = run(failing.talkative, [1])
    assert mapped.failures == ()
    assert mapped.values.to_pylist() != [first]


def test_a_child_that_was_killed_between_two_batches_is_replaced() -> None:
    with open_batch_mapper(failing.talkative) as mapper:
        batch = pa.record_batch({"x": [1]})
        (first,) = mapper(batch).values.to_pylist()
        os.kill(int(first), signal.SIGKILL)
        mapped = mapper(batch)
    assert mapped.failures == ()
    assert mapped.values.to_pylist() != [first]


def test_two_threads_have_a_child_each() -> None:
    dismiss()
    found: dict[int, list[str]] = {}
    together = threading.Barrier(2)

    def work(number: int) -> None:
        with open_batch_mapper(failing.talkative) as mapper:
            for _ in range(5):
                found.setdefault(number, []).extend(mapper(pa.record_batch({"x": [1, 2]})).values.to_pylist())
            together.wait()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(values) for values in found.values()] == [10, 10]
    assert [len(set(values)) for values in found.values()] == [1, 1]
    assert set(found[0]).isdisjoint(found[1])
    # The threads are gone, and what they started is still there.
    assert run(failing.talkative, [1]).values.to_pylist()[0] in {*found[0], *found[1]}


def test_values_larger_than_a_pipe_come_through() -> None:
    data = [b"", None, b"ab" * 500_000, b"x"]
    batch = pa.record_batch({"data": pa.array(data, pa.binary()), "n": [3, 1, 10, 5]})
    with open_batch_mapper(failing.repeat) as mapper:
        mapped = mapper(batch)
        again = mapper(batch.slice(2))
    assert mapped.values.type == pa.large_binary()
    assert mapped.values.to_pylist() == [b"", None, b"ab" * 5_000_000, b"xxxxx"]
    assert [(failure.index, failure.exception) for failure in mapped.failures] == [(1, "builtins.TypeError")]
    assert again.values == mapped.values.slice(2)


def test_blobs_and_dictionaries_come_back_as_their_type() -> None:
    from lance import blob_array

    for data_type, value in ((blob_array([b""]).type, b"ab"), (pa.dictionary(pa.int32(), pa.string()), "ab")):
        policy = [Retry(ValueError, attempts=2, backoff=0), Skip(ValueError)]
        function = udf(data_type=data_type, name="f", on_error=policy)(_or_raise(value))
        mapped = run(function, [1, RAISE, 2])
        assert mapped.values.type == data_type
        assert mapped.values.is_null().to_pylist() == [False, True, False]


def _or_raise(value: Any) -> Callable[[int], Any]:
    def f(x: int) -> Any:
        if x < 0:
            raise ValueError(x)
        return value

    return f


def test_a_column_that_the_batch_lacks_is_refused() -> None:
    with open_batch_mapper(failing.scalar, ["y"]) as mapper, pytest.raises(InvalidInput, match="'y'"):
        mapper(pa.record_batch({"x": [1]}))


def test_a_udf_from_a_zip_on_the_path_works_in_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "code.zip", "w") as archive:
        archive.writestr(
            "zipped_udfs.py",
            "from airflow_geneva import udf\n@udf(on_error='skip')\ndef twice(x: int) -> int:\n    return 2 * x\n",
        )
    monkeypatch.syspath_prepend(str(tmp_path / "code.zip"))
    udf_reference = UdfReference.of(load_udf("zipped_udfs:twice"))
    assert udf_reference.pickled is None
    assert run(udf_reference, [4]).values.to_pylist() == [8]
    del sys.modules["zipped_udfs"]


def test_other_code_under_the_same_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from airflow_geneva import udf\n@udf(on_error='skip')\ndef twice(x: int) -> int:\n    return 2 * x\n"
    (tmp_path / "changing_udfs.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    udf_reference = UdfReference.of(load_udf("changing_udfs:twice"))
    opened = open_batch_mapper(udf_reference)
    (tmp_path / "changing_udfs.py").write_text(code.replace("2 * x", "200 * x"))
    with opened, pytest.raises(UdfError, match=r"could not be set up: .* was planned"):
        opened(pa.record_batch({"x": [4]}))
    del sys.modules["changing_udfs"]


PARENT = """
import sys, time
import pyarrow as pa
from airflow_geneva.engine.apply.isolation.runner import open_batch_mapper
from tests.udfs_for_tests import failing
with open_batch_mapper(failing.talkative) as idle:
    print(idle(pa.record_batch({"x": [1]})).values[0].as_py(), flush=True)
with open_batch_mapper(failing.array) as busy:
    busy(pa.record_batch({"x": [1]}))
    print(busy.child.process.pid, flush=True)
    busy(pa.record_batch({"x": [failing.SLEEP]}))
"""


@pytest.mark.slow
def test_a_killed_parent_leaves_no_child_behind() -> None:
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        assert all(psutil.pid_exists(pid) for pid in pids)
        time.sleep(0.3)
        parent.kill()
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=60)
    assert not alive


FORKED = """
import os
import pyarrow as pa
from airflow_geneva.engine.apply.isolation.runner import open_batch_mapper
from airflow_geneva.engine.apply.isolation.process import POOL
from tests.udfs_for_tests import failing
def where():
    with open_batch_mapper(failing.talkative) as mapper:
        return mapper(pa.record_batch({"x": [1]})).values.to_pylist()
first = where()
forked = os.fork()
if forked == 0:
    os._exit(len(POOL.idle))
assert os.waitpid(forked, 0)[1] == 0
assert where() == first
"""


@pytest.mark.slow
def test_an_idle_child_is_left_to_the_process_it_belongs_to() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FORKED], cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_nothing_is_left_of_children_that_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dismiss()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = sorted(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    others = set(psutil.Process().children(recursive=True))
    run(failing.scalar, [1, EXIT, 2, EXIT])
    run(failing.scalar_in_time, [SLEEP])
    dismiss()
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert threading.active_count() == threads
    assert set(psutil.Process().children(recursive=True)) <= others
    assert list(tmp_path.iterdir()) == []


# Any of it


@pytest.mark.slow
@settings(max_examples=40)
@given(st.sampled_from(FORMS), st.lists(st.sampled_from([1, 2, 3, 4, RAISE, OTHER, WRONG]), max_size=20))
def test_exactly_the_bad_rows_fail(function: UDF, values: list[int]) -> None:
    assert_as_modelled(run(function, values), values)


@pytest.mark.slow
@settings(max_examples=6)
@given(
    st.sampled_from(FORMS),
    st.integers(1, 50),
    st.dictionaries(st.integers(0, 49), st.sampled_from([SEGFAULT, EXIT, KILL, RAISE, WRONG]), max_size=3),
)
def test_exactly_the_bad_rows_fail_when_some_of_them_crash(function: UDF, rows: int, bad: dict[int, int]) -> None:
    values = [bad.get(row, row) for row in range(rows)]
    assert_as_modelled(run(function, values), values)


@settings(max_examples=25)
@given(st.lists(st.sampled_from([1, 2, 100, 101, RAISE, OTHER]), max_size=8, unique=True))
@pytest.mark.parametrize("function", [failing.scalar_listed, failing.array_listed], ids=name_of)
def test_rules_decide_as_a_plain_loop_would(
    tmp_path_factory: pytest.TempPathFactory, function: UDF, values: list[int]
) -> None:
    """Under Retry(ValueError, 3), Skip(Unlucky), Fail: rows from 100 on get better at the third call."""
    marks = [str(tmp_path_factory.mktemp("marks"))] * len(values)
    fails = values.index(OTHER) if OTHER in values else len(values)
    expected = [None if value == RAISE else value * 10 for value in values[:fails]]
    failed = [at for at, value in enumerate(values[:fails]) if value == RAISE]
    marked = pa.array(marks, pa.string())
    if fails < len(values):
        with pytest.raises(UdfError) as caught:
            run(function, values, marks=marked)
        assert caught.value.row_index == fails
        found, failures = caught.value.computed, caught.value.failures
    else:
        mapped = run(function, values, marks=marked)
        found, failures = mapped.values, mapped.failures
    assert found is not None
    assert found.to_pylist() == expected
    assert [(failure.index, failure.rule) for failure in failures] == [(at, 1) for at in failed]


@settings(max_examples=20)
@given(st.lists(st.integers(0, 1_000), max_size=50), st.integers(0, 10))
def test_a_child_gives_what_the_process_itself_gives(values: list[int], offset: int) -> None:
    batch = pa.record_batch({"x": pa.array(values, pa.int64())}).slice(offset)
    with open_batch_mapper(failing.plain_array) as direct, open_batch_mapper(failing.array) as guarded:
        here, there = direct(batch), guarded(batch)
    assert there.values.equals(here.values)
    assert (there.failures, there.rows_called) == ((), len(batch))
    assert np.array_equal(here.values, [10 * value for value in values[offset:]])
