"""What users copy from the documentation passes mypy with the installed package, whose annotations count (py.typed)."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SNIPPETS = ROOT / "docs" / "snippets"
CACHE = ROOT / ".mypy_cache" / "users"  # without it Airflow is read for most of a minute
COPIED = (
    "notebook.py",
    "sizing_dag.py",
    "quickstart/count_words.py",
    "quickstart/follow_docs.py",
    "quickstart/text_udfs.py",
)

MISTAKEN = """
from airflow_geneva import connect
from airflow_geneva.task_groups import BackfillTaskGroup, RefreshTaskGroup

table = connect("library").open_table("docs")
table.backfill(7)  # call-overload
table.backfill("n", concurrency="many")  # call-overload
table.plan_backfill("n", checkpoint_siz=7)  # call-arg
table.backfil("n")  # attr-defined
rows: str = table.backfill("n").rows_computed  # assignment
BackfillTaskGroup(table="docs", column=7)  # arg-type
BackfillTaskGroup(table="docs", column="n", shard_sizes=3)  # call-arg
BackfillTaskGroup(table="docs", column="n", shard_size=[3])  # arg-type
RefreshTaskGroup(view="v", commit_granularity=3)  # call-arg
"""


def test_a_users_code_is_checked_against_the_annotations_of_the_package(tmp_path: Path) -> None:
    for name in COPIED:
        shutil.copy(SNIPPETS / name, tmp_path)
    (tmp_path / "mistaken.py").write_text(MISTAKEN)
    options = ["--strict", "--ignore-missing-imports", "--config-file=", "--no-pretty", "--cache-dir", str(CACHE)]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "."], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    found = set(re.findall(r"^(\S+):(\d+): error: .*\[([a-z-]+)]$", done.stdout, re.MULTILINE))
    lines = enumerate(MISTAKEN.splitlines(), start=1)
    assert found == {("mistaken.py", str(at), line.split("# ")[1]) for at, line in lines if "# " in line}, done.stdout
