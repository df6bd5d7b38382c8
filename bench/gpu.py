"""Measure a small transformer and an image model on an accelerator, with their stages."""

from __future__ import annotations

import io
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from airflow_geneva import connect, udf

_SIDE, _TOKENS, _VOCABULARY = 224, 128, 30_522
_PIXELS = pa.list_(pa.uint8(), 3 * _SIDE * _SIDE)
_IDS = pa.list_(pa.int32(), _TOKENS)


def why_not() -> str:
    """Return why nothing can be measured here; "" if an accelerator and its libraries are available."""
    try:
        import torch  # type: ignore[import-not-found]
        import torchvision  # type: ignore[import-not-found]  # noqa: F401
        from PIL import Image  # noqa: F401
    except ImportError as error:
        return f"{error.name} is not installed"
    return "" if torch.cuda.is_available() else "PyTorch finds no accelerator"


@udf(data_type=_PIXELS)
def decode(image: bytes) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(image)).convert("RGB").resize((_SIDE, _SIDE))).ravel()


@udf(data_type=_IDS)
def tokenize(text: str) -> np.ndarray:
    ids = [zlib.crc32(word.encode()) % _VOCABULARY for word in text.lower().split()][:_TOKENS]
    return np.pad(np.array(ids, np.int32), (0, _TOKENS - len(ids)))


class _Network:
    """A network with random weights, which is as fast as one with trained weights."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        torch.manual_seed(0)
        self.network = self.make().eval().half().cuda()

    def make(self) -> Any:
        raise NotImplementedError

    def vectors(self, inputs: Any) -> np.ndarray:
        with self.torch.inference_mode():
            found: np.ndarray = self.network(inputs).float().cpu().numpy()
            return found


class _Resnet(_Network):
    def make(self) -> Any:
        import torchvision

        return torchvision.models.resnet50(weights=None)

    def __call__(self, pixels: pa.FixedSizeListArray) -> np.ndarray:
        images = np.asarray(pixels.flatten()).reshape(-1, _SIDE, _SIDE, 3)
        return self.vectors(self.torch.from_numpy(images).cuda().permute(0, 3, 1, 2).half() / 255)


class _Transformer(_Network):
    """Six layers of 384, as all-MiniLM-L6 has."""

    def make(self) -> Any:
        nn = self.torch.nn
        layer = nn.TransformerEncoderLayer(384, 12, 1_536, batch_first=True)
        return nn.Sequential(nn.Embedding(_VOCABULARY, 384), nn.TransformerEncoder(layer, 6))

    def __call__(self, ids: pa.FixedSizeListArray) -> np.ndarray:
        rows = np.asarray(ids.flatten()).reshape(-1, _TOKENS)
        with self.torch.inference_mode():
            found: np.ndarray = self.network(self.torch.from_numpy(rows).long().cuda()).mean(1).float().cpu().numpy()
            return found


def _image(random: np.random.Generator) -> bytes:
    from PIL import Image

    small = Image.fromarray(random.integers(0, 255, (60, 80, 3), np.uint8))
    file = io.BytesIO()
    small.resize((640, 480)).save(file, "JPEG")
    return file.getvalue()


def _text(random: np.random.Generator) -> str:
    return " ".join(f"word{number}" for number in random.integers(0, 5_000, random.integers(10, _TOKENS)))


def measure(folder: str, rows: int, workers: int) -> list[dict[str, Any]]:
    """Compute a column with each network, without and with a stage, compared with a bare loop over prepared rows."""
    random, found = np.random.default_rng(0), []
    cases: list[tuple[str, Any, Any, Any, pa.DataType, int]] = [
        ("images, ResNet-50", _image, decode, _Resnet, pa.list_(pa.float32(), 1_000), 64),
        ("texts, a transformer of MiniLM's size", _text, tokenize, _Transformer, pa.list_(pa.float32(), 384), 256),
    ]
    for title, make, stage, network, kind, size in cases:
        inputs = [make(random) for _ in range(rows)]
        column = stage.signature.required[0]
        table = connect(Path(folder) / network.__name__).create_table(
            "rows", pa.table({column: inputs}), max_rows_per_file=max(rows // 8, 1)
        )

        class Whole(network):  # type: ignore[misc]
            def __call__(self, values: pa.Array, stage: Any = stage, network: Any = network) -> np.ndarray:
                made = [stage(value) for value in values.to_pylist()]
                return network.__call__(self, pa.array(made, stage.data_type))

        settings: dict[str, Any] = {"data_type": kind, "batch_size": size, "version": "1"}
        staged = {"preprocess": stage, "preprocess_workers": workers}
        without = udf(name="without", input_columns=[column], **settings)(Whole)
        with_stage = udf(name="with_stage", **settings, **staged)(network)
        sides = {"a bare loop": None, "one function": without, f"a stage of {workers} processes": with_stage}
        prepared = pa.array([stage(value) for value in inputs], stage.data_type)
        warm = network()
        warm(prepared[:size])
        for side, function in sides.items():
            began = time.perf_counter()
            with _device_use() as use:
                if function is None:
                    for start in range(0, rows, size):
                        warm(prepared[start : start + size])
                else:
                    table.add_columns({function.name: (function, [column])})
                    table.backfill(function.name, udf=function, runner="inline")
            seconds = time.perf_counter() - began
            found.append({"case": title, "side": side, "seconds": seconds, "rows": rows, **use})
    return found


@contextmanager
def _device_use() -> Iterator[dict[str, float]]:
    """Ask NVML every tenth of a second for the fraction of the time in which a kernel ran."""
    import torch

    found: dict[str, float] = {}
    asked, ended = list[int](), threading.Event()

    def ask() -> None:
        while not ended.wait(0.1):
            asked.append(torch.cuda.utilization())

    try:
        torch.cuda.utilization()
    except Exception as error:  # its library may be missing, or refuse
        print(f"NVML does not say how busy the device is: {error}")
        ended.set()
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    yield found
    ended.set()
    thread.join()
    if asked:
        found["device_busy"] = sum(asked) / len(asked) / 100
