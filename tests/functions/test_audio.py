"""`transcribe`, with a small Whisper model that the tests write."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from airflow_geneva import connect
from airflow_geneva.errors import InvalidInput
from airflow_geneva.functions import transcribe
from tests.support.whisper_model import ENDS, sound, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("whisper") / "model")


def silent_video() -> bytes:
    import av

    written = io.BytesIO()
    with av.open(written, "w", format="matroska") as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for frame in (av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24"), None):
            container.mux(stream.encode(frame))
    return written.getvalue()


def test_a_view_has_a_row_for_each_segment_and_skips_files_that_cannot_be_decoded(tmp_path: Path, model: str) -> None:
    database = connect(tmp_path / "db")
    recordings = pa.array([sound(2), None, b"no sound", silent_video(), sound(0)], pa.binary())
    table = database.create_table("calls", pa.table({"id": range(5), "audio": recordings}))
    made = transcribe(model, output="segments", device="cpu", on_error="skip")
    query = table.query().select({"id": "id", "segment": (made, ["audio"])}).explode("segment")
    view = query.create_materialized_view(database, "segments")
    assert view.refresh(runner="inline").rows_failed == 2
    found = [(row["id"], row["segment"]) for row in view.to_arrow().to_pylist()]
    assert found == [(0, {"start": 0.0, "end": ENDS, "text": "Hello world."})]
    messages = [record.message for record in view.get_errors()]
    assert sum("The recording of 8 bytes cannot be decoded: " in message for message in messages) == 1
    assert len(messages) == 2


def test_a_text_is_joined_from_the_segments_and_silence_is_skipped_if_asked(model: str) -> None:
    made = transcribe(model, device="cpu")
    assert made.data_type == pa.string()
    assert made(sound(40)) == "Hello world. Hello world."
    assert made(sound(0)) == ""
    assert made(None) is None
    assert transcribe(model, device="cpu", skip_silence=True)(sound(1)) == "", "a tone is no speech"


def test_the_version_follows_what_changes_the_text_and_bad_parameters_are_named() -> None:
    made = [transcribe(), transcribe("base"), transcribe(language="en"), transcribe(task="translate")]
    made += [transcribe(output="segments"), transcribe(skip_silence=True), transcribe(compute_type="int8")]
    assert len({one.code_version for one in made}) == len(made)
    assert transcribe(device="cpu").code_version == made[0].code_version
    for wrong in ({"task": "sing"}, {"output": "words"}, {"device": "tpu"}):
        [(name, value)] = wrong.items()
        with pytest.raises(InvalidInput, match=f"{name}='{value}'"):
            transcribe(**wrong)  # type: ignore[arg-type]
