"""Functions that many tables of files need: what kind of file it is, in which language a text is, frames of a video."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pyarrow as pa

from airflow_geneva import udf
from airflow_geneva.functions import read_file

# --8<-- [start:kind]
KIND = pa.struct([("label", pa.string()), ("mime_type", pa.string()), ("score", pa.float32())])


@udf(data_type=KIND, preprocess=read_file(), on_error="skip")
class kind_of:
    """Return what the content of a file is, whatever its name says, by the model of the package `magika`."""

    def __init__(self) -> None:
        from magika import Magika

        self.magika = Magika()

    def __call__(self, file: bytes) -> dict:
        found = self.magika.identify_bytes(file)
        return {"label": found.output.label, "mime_type": found.output.mime_type, "score": found.score}


# --8<-- [end:kind]
# --8<-- [start:language]
@udf(data_type=pa.string())
def language_of(text: str | None) -> str | None:
    """Return the language of a text by the model of the package `py3langid`; NULL for an empty text."""
    import py3langid  # loads its model at the first text

    return py3langid.classify(text)[0] if text and text.strip() else None


# --8<-- [end:language]
# --8<-- [start:frames]
FRAME = pa.struct([("at", pa.float32()), ("image", pa.binary())])


@udf(data_type=pa.list_(FRAME), on_error="skip")
def frames(video: bytes) -> Iterator[dict]:
    """Yield the frame of each tenth second of a video as a JPEG, by the package `av`."""
    import av

    with av.open(io.BytesIO(video)) as opened:
        [stream, *_] = opened.streams.video
        due = 0.0
        for frame in opened.decode(stream):
            if frame.time is not None and frame.time >= due:
                written = io.BytesIO()
                frame.to_image().save(written, "jpeg")
                yield {"at": frame.time, "image": written.getvalue()}
                due = frame.time - frame.time % 10 + 10


# --8<-- [end:frames]
