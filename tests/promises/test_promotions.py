"""Promotes and ways back beside readers and writers, with SIGKILLs: a reader sees one model, no value is made twice."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from tests.support.promoting import LIVE, Stage, compute_both

pytestmark = pytest.mark.crash


@pytest.mark.parametrize(
    ("promotions", "kills"), [(12, 5), pytest.param(1_000, 200, marks=pytest.mark.soak, id="many")]
)
def test_a_version_is_of_one_model_whatever_is_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], promotions: int, kills: int
) -> None:
    stage, chance = Stage(tmp_path), random.Random(promotions)
    others = [stage.start(role) for role in ("write", "read", "read")]
    killed, each = 0, max(promotions // kills, 1)
    while killed < kills or len(stage.done) < promotions:
        last = killed >= kills
        point = chance.choice(["promote.before", "promote.after"])
        by_chance = not last and chance.random() < 0.3
        fault = "" if last or by_chance else f"{point}:{chance.randint(1, each)}"
        process, before = stage.start("promote", fault), len(stage.done)
        while process.poll() is None:
            assert all(other.poll() is None for other in others), "a reader or a writer has ended"
            if by_chance and len(stage.done) > before:
                time.sleep(chance.uniform(0, 0.2))
                process.send_signal(signal.SIGKILL)
            if last and len(stage.done) >= promotions:
                break
            time.sleep(0.01)
        if not last:
            assert process.wait() == -signal.SIGKILL
            killed += 1
    [wrote, *read, promoted] = stage.stop([*others, process])
    # What a process began before it was killed was called again, and no promotion was made twice.
    assert stage.commits == len(stage.done) >= promotions
    assert all(set(seen) == {"1", "2"} for seen in read), read
    compute_both(stage.table)
    rows = stage.table.to_arrow()
    for column in stage.table.schema.names[2:]:
        models = {value[0] for value in rows[column].to_pylist()}
        assert len(models) == 1
        assert [value[1] for value in rows[column].to_pylist()] == rows["x"].to_pylist()
    assert stage.table.column_function(LIVE)(-1)[0] == rows[LIVE][0].as_py()[0]
    again = [call for call, times in stage.calls().items() if times > 1]
    assert again == []
    with capsys.disabled():
        print(f"\n{len(stage.done)} promotions, {killed} kills, reads by model {read}, writes {wrote}, {promoted}")
