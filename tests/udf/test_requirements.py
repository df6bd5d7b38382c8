"""`requirements=`: what a function needs is checked where it runs, before its module is imported and the first row."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva import connect, udf
from airflow_geneva.engine.udf.packages import check_installed
from airflow_geneva.errors import InvalidInput, JobFailed

INSTALLED = metadata.version("pyarrow")


@pytest.mark.parametrize(
    ("required", "says"),
    [
        ([], None),
        (["pyarrow"], None),
        ([f"pyarrow=={INSTALLED}", "numpy>=1,<1000"], None),
        (["pyarrow ~= 1.0"], f"pyarrow ~= 1.0: version {INSTALLED} is installed"),
        (["pyarrow>=1", "no-such-package==3.*", "nor_this"], "no-such-package==3.* is not installed, nor_this is not"),
    ],
)
def test_all_that_is_missing_is_named_with_the_command_that_installs_it(required: list[str], says: str | None) -> None:
    if says is None:
        check_installed("f", required)
        return
    with pytest.raises(InvalidInput) as refused:
        check_installed("f", required)
    listed = " ".join(f"'{one}'" for one in required)
    assert says in str(refused.value)
    assert str(refused.value).endswith(f"{sys.executable} -m pip install {listed}")


@pytest.mark.parametrize(
    ("required", "says"),
    [
        ("rapidocr", "is one requirement. Give a list"),
        (["a package"], "'a package' in requirements is not valid"),
        (["torch=>2"], "'torch=>2' in requirements is not valid"),
        (["torch @ https://example.org/torch.whl"], "give a package as"),
        (["torch>=2; rm -rf /"], "give a package as"),
        (["`id`"], "give a package as"),
        ([7], "7 in requirements is not valid"),
    ],
)
def test_what_is_no_requirement_is_refused_where_it_is_written(required: Any, says: str) -> None:
    with pytest.raises(InvalidInput, match="requirements") as refused:
        udf(data_type=pa.int64(), requirements=required)(abs)
    assert says in str(refused.value)


def test_a_job_names_what_is_missing_before_a_row_runs_and_the_definition_names_what_is_needed(tmp_path: Path) -> None:
    calls = []

    @udf(data_type=pa.int64(), version="1", requirements=["no-such-package==3.*"])
    def double(x: int) -> int:
        calls.append(x)
        return 2 * x

    table = connect(tmp_path / "db").create_table("t", pa.table({"x": [1, 2]}))
    table.add_columns({"y": (double, ["x"])})
    assert "needs no-such-package==3.*" in str(table.plan_backfill("y"))
    with pytest.raises(JobFailed, match=r"no-such-package==3\.\* is not installed"):
        table.backfill("y", runner="inline")
    assert not calls
    assert table.definition("y").requirements == ["no-such-package==3.*"]

    @udf(data_type=pa.int64(), version="1", requirements=["pyarrow"])
    def doubled(x: int) -> int:
        return 2 * x

    assert doubled.code_version == double.code_version
    table.backfill("y", udf=doubled, runner="inline")
    assert table.to_arrow().column("y").to_pylist() == [2, 4]
