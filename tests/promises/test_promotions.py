"""Promotes and ways back beside readers and writers, with SIGKILLs: a reader sees one model, no value is made twice."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from airflow_geneva import connect
from tests.support.counting import Trace, label, triple
from tests.support.object_store import Bucket, numbers, options_of
from tests.support.outage import Proxy
from tests.support.promoting import LIVE, Stage, compute_both

pytestmark = pytest.mark.crash


@pytest.mark.parametrize(
    ("promotions", "kills"), [(12, 5), pytest.param(1_000, 200, marks=pytest.mark.soak, id="many")]
)
def test_a_version_is_of_one_model_whatever_is_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], promotions: int, kills: int
) -> None:
    with Stage(tmp_path) as stage:
        wrote, *read, promoted = kill_promotions(stage, promotions, kills)
        compute_both(stage.table)
        # What a process began before it was killed was called again, and no promotion was made twice.
        assert stage.commits == len(stage.done) >= promotions
        assert all(set(seen) == {"1", "2"} for seen in read), read
        rows = stage.table.to_arrow()
        for column in stage.table.schema.names[2:]:
            assert len({value[0] for value in rows[column].to_pylist()}) == 1
            assert [value[1] for value in rows[column].to_pylist()] == rows["x"].to_pylist()
        assert stage.table.column_function(LIVE)(-1)[0] == rows[LIVE][0].as_py()[0]
        assert [call for call, times in stage.calls().items() if times > 1] == []
    with capsys.disabled():
        print(f"\n{len(stage.done)} promotions, {kills} kills, reads by model {read}, writes {wrote}, {promoted}")


def kill_promotions(stage: Stage, promotions: int, kills: int) -> list[dict[str, Any]]:
    """Promote and go back beside a writer and two readers, kill what promotes, and return what each reports."""
    chance = random.Random(promotions)
    others = [stage.start(role) for role in ("write", "read", "read")]
    for _ in range(kills):
        by_chance = chance.random() < 0.3
        point = chance.choice(["promote.before", "promote.after"])
        fault = "" if by_chance else f"{point}:{chance.randint(1, max(promotions // kills, 1))}"
        process, before = stage.start("promote", fault), len(stage.done)
        while process.poll() is None:
            stage.check(others)
            if by_chance and len(stage.done) > before:
                time.sleep(chance.uniform(0, 0.2))
                process.send_signal(signal.SIGKILL)
            time.sleep(0.01)
        assert process.returncode == -signal.SIGKILL
    last = stage.start("promote")
    while len(stage.done) < promotions:
        stage.check([*others, last])
        time.sleep(0.01)
    return stage.stop([*others, last])


@pytest.mark.parametrize("retries", [{}, {"client_max_retries": "0"}])
def test_a_promotion_on_a_store_that_loses_the_answer_is_made_once(
    bucket: Bucket, proxy: Proxy, trace: Trace, retries: dict[str, str]
) -> None:
    table = connect(bucket.uri, {**options_of(proxy.endpoint), **retries}).create_table("docs", numbers(1, 2, 3))
    table.add_columns({"live": triple, "candidate": label})
    table.backfill(["live", "candidate"], runner="inline")
    version, values = table.version, table.to_arrow(["candidate"])["candidate"].to_pylist()
    proxy.lose_answer(rb"PUT .*/_versions/")
    done = table.promote_column("candidate", to="live", keep_as="before")
    assert proxy.has_lost
    assert done.version == table.version == version + 1
    assert table.to_arrow(["live"])["live"].to_pylist() == values
    assert done.plan is not None
    assert table.promote_column("before", to="live", keep_as="candidate").version == version + 2
