"""Transcribe speech with a model that runs where the function runs."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from airflow_geneva.engine.udf import UDF
from airflow_geneva.functions.made import check_choice, library, make

_SEGMENT = pa.struct([("start", pa.float64()), ("end", pa.float64()), ("text", pa.string())])


class _Transcribe:
    """Transcribe a recording with a local Whisper model, which is loaded once per process."""

    name = "transcribe"
    revision = 1
    model: str
    language: str | None
    task: str
    output: str
    skip_silence: bool
    device: str
    compute_type: str

    def __init__(self) -> None:
        whisper = library("faster_whisper", "airflow-geneva[audio]")
        self.unreadable: type[Exception] = library("av", "airflow-geneva[audio]").error.FFmpegError
        self.decode = whisper.decode_audio
        self.loaded = whisper.WhisperModel(self.model, device=self.device, compute_type=self.compute_type)

    def __call__(self, audio: bytes) -> Any:
        if audio is None:
            return None
        segments = list(self.segments(self.samples(audio)))
        return segments if self.output == "segments" else " ".join(one["text"] for one in segments)

    def samples(self, audio: bytes) -> Any:
        try:
            return self.decode(io.BytesIO(audio), sampling_rate=self.loaded.feature_extractor.sampling_rate)
        except (self.unreadable, IndexError) as error:  # IndexError: a video without an audio track
            raise ValueError(f"The recording of {len(audio):,} bytes cannot be decoded: {error}") from error

    def segments(self, samples: Any) -> Iterator[dict[str, Any]]:
        if not len(samples):
            return
        found, _ = self.loaded.transcribe(samples, language=self.language, task=self.task, vad_filter=self.skip_silence)
        for one in found:
            yield {"start": one.start, "end": one.end, "text": one.text.strip()}


def transcribe(
    model: str = "small",
    *,
    language: str | None = None,
    task: str = "transcribe",
    output: str = "text",
    skip_silence: bool = False,
    device: str = "auto",
    compute_type: str = "default",
    **settings: Any,
) -> UDF:
    """Make a UDF that transcribes recordings with `faster-whisper`. It needs `airflow-geneva[audio]`.

    An input is an encoded file, audio or video, in any format that FFmpeg decodes; the first audio track is used. A
    recording that cannot be decoded fails its row with a `ValueError`. NULL has no transcript.

    Args:
        model: a size such as `"small"` or `"large-v3"`, or a model ID of the Hugging Face Hub, downloaded where the
            function runs; or the folder of a model that CTranslate2 reads. Pin what you load: new weights under an
            old name are no new version of the function.
        language: code of the language, such as `"en"`; None detects it in each recording.
        task: `"transcribe"`, or `"translate"` to get English text.
        output: `"text"`: one string; or `"segments"`: a list of structs `start`, `end` (seconds) and `text`, for a
            view with a row for each segment: `.explode("segment")`.
        skip_silence: find speech first, and give the model only that.
        device: `"cpu"`, `"cuda"` or `"auto"`; not a part of the version.
        compute_type: precision in which CTranslate2 computes, such as `"int8"` or `"float16"`.
        settings: for the decorator `udf`, such as `num_gpus`, `memory` and `on_error`.
    """
    check_choice("task", task, ["transcribe", "translate"])
    check_choice("output", output, ["text", "segments"])
    check_choice("device", device, ["auto", "cpu", "cuda"])
    given = {
        "model": model, "language": language, "task": task, "output": output, "skip_silence": skip_silence,
        "compute_type": compute_type,
    }  # fmt: skip
    kind = pa.string() if output == "text" else pa.list_(_SEGMENT)
    return make(_Transcribe, kind, given, settings, device=device)
