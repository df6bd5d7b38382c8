"""Decode images, bring them to one size, and embed them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from airflow_geneva.engine.choices import check_whole
from airflow_geneva.engine.udf import UDF
from airflow_geneva.errors import InvalidInput
from airflow_geneva.functions.made import check_choice, filled, library, make

_CHANNELS = {"RGB": 3, "RGBA": 4, "L": 1}
_EMBEDS = "image_embeds"
"""What exports of CLIP call the projected vectors, which text embeddings of the same model can be compared with."""


def decode(pillow: Any, operations: Any, image: bytes, mode: str) -> Any:
    """Return the image that the bytes encode, upright; the arguments are the modules `PIL.Image` and `PIL.ImageOps`."""
    try:
        with pillow.open(io.BytesIO(image)) as opened:
            return _in_mode(operations.exif_transpose(opened), mode)
    except pillow.UnidentifiedImageError as error:
        raise ValueError(
            f"{len(image):,} bytes that begin with {image[:8]!r} are no image that Pillow knows."
        ) from error
    except (OSError, EOFError, SyntaxError, RuntimeError, AttributeError, pillow.DecompressionBombError) as error:
        raise ValueError(f"The image of {len(image):,} bytes cannot be decoded: {error}") from error


def _in_mode(image: Any, mode: str) -> Any:
    if image.mode.startswith("I;16"):  # Pillow's own conversion turns all but the darkest 256 levels white
        image = image.convert("I").point(lambda level: level * (1 / 257)).convert("L")
    elif image.mode in ("I", "F"):
        raise ValueError("The image has pixels of 32 bits, and does not say which value is white. Convert it before.")
    return image.convert(mode)


class _Images:
    """Decode an image and resize it."""

    name = "images"
    revision = 2
    size: tuple[int, int]
    output: str
    mode: str
    fit: str

    def __init__(self) -> None:
        self.pillow = library("PIL.Image", "airflow-geneva[images]")
        self.operations = library("PIL.ImageOps", "airflow-geneva[images]")

    def __call__(self, image: bytes) -> Any:
        if image is None:
            return None
        upright = decode(self.pillow, self.operations, image, self.mode)
        how = self.pillow.Resampling.BICUBIC
        if self.fit == "stretch":
            made = upright.resize(self.size, how)
        else:
            made = getattr(self.operations, self.fit)(upright, self.size, how)
        if self.output == "tensor":
            import numpy as np

            return np.asarray(made, np.uint8).ravel()
        written = io.BytesIO()
        made.save(written, self.output)
        return written.getvalue()


def images(
    size: Sequence[int] = (224, 224), *, output: str = "tensor", mode: str = "RGB", fit: str = "pad", **settings: Any
) -> UDF:
    """Make a UDF that decodes images with Pillow and resizes them. It needs `airflow-geneva[images]`.

    A damaged image, or one with more pixels than Pillow decodes, fails the row with a `ValueError`. Photos are rotated
    upright. The first frame of an animation is used. Transparent pixels keep their color in `"RGB"`.

    Args:
        size: width and height.
        output: `"tensor"`: a fixed-size list of uint8, row by row from the top, all channels of a pixel together; or
            encoded bytes: `"png"`, `"jpeg"` or `"webp"`.
        mode: `"RGB"`, `"RGBA"`, or `"L"` for gray.
        fit: `"pad"` keeps the whole image and pads with black; `"fit"` fills the size and crops the rest;
            `"stretch"` changes its shape.
        settings: arguments of the decorator `udf`, such as `on_error`.
    """
    if not isinstance(size, Sequence) or len(size) != 2:
        raise InvalidInput(f"size={size!r}: give width and height.")
    for setting, value in zip(("width", "height"), size, strict=True):
        check_whole(setting, value)
    check_choice("output", output, ["tensor", "png", "jpeg", "webp"])
    check_choice("mode", mode, list(_CHANNELS))
    check_choice("fit", fit, ["pad", "fit", "stretch"])
    if (output, mode) == ("jpeg", "RGBA"):
        raise InvalidInput("output='jpeg' has no transparency. Give mode='RGB', or output='png'.")
    tensor = pa.list_(pa.uint8(), size[0] * size[1] * _CHANNELS[mode])
    given = {"size": tuple(size), "output": output, "mode": mode, "fit": fit}
    return make(_Images, tensor if output == "tensor" else pa.binary(), given, settings)


class _ClipEmbeddings:
    """Embed images with a CLIP model in ONNX format, which is loaded once per process."""

    name = "clip_embeddings"
    revision = 1
    model: str
    dimensions: int
    normalize: bool
    size: int
    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]

    def __init__(self) -> None:
        self.pillow = library("PIL.Image", "airflow-geneva[clip]")
        self.operations = library("PIL.ImageOps", "airflow-geneva[clip]")
        runtime = library("onnxruntime", "airflow-geneva[clip]")
        self.session = runtime.InferenceSession(self.model, providers=runtime.get_available_providers())
        inputs = self.session.get_inputs()
        if len(inputs) != 1:
            raise InvalidInput(
                f"The model {self.model!r} has the inputs {', '.join(one.name for one in inputs)}, and only an image "
                "is given. Export the vision part of the model alone."
            )
        self.input = inputs[0].name
        self.kind = "float16" if "float16" in inputs[0].type else "float32"
        outputs = [one.name for one in self.session.get_outputs()]
        self.output = _EMBEDS if _EMBEDS in outputs else outputs[0]

    def __call__(self, image: pa.Array) -> pa.Array:
        import numpy as np

        given = image.to_pylist()
        at = [row for row, one in enumerate(given) if one is not None]
        if not at:
            return filled([], at, len(given), self.dimensions)
        pixels = np.stack([self.pixels(given[row]) for row in at]).astype(self.kind)
        [found] = self.session.run([self.output], {self.input: pixels})
        if found.ndim != 2:
            raise ValueError(
                f"The output {self.output!r} of the model has the shape {found.shape}, not one vector for each image. "
                f"Export the model with its projection, whose output is {_EMBEDS!r}."
            )
        found = found.astype(np.float32)
        if self.normalize:
            lengths = np.linalg.norm(found, axis=1, keepdims=True)
            found = found / np.where(lengths > 0, lengths, 1)
        return filled(found, at, len(given), self.dimensions)

    def pixels(self, image: bytes) -> Any:
        import numpy as np

        upright = decode(self.pillow, self.operations, image, "RGB")
        fitted = self.operations.fit(upright, (self.size, self.size), self.pillow.Resampling.BICUBIC)
        scaled = (np.asarray(fitted, np.float32) / 255 - np.array(self.mean)) / np.array(self.deviation)
        return scaled.astype(np.float32).transpose(2, 0, 1)


def clip_embeddings(
    model: str,
    dimensions: int = 512,
    *,
    normalize: bool = False,
    size: int = 224,
    mean: Sequence[float] = (0.48145466, 0.4578275, 0.40821073),
    deviation: Sequence[float] = (0.26862954, 0.26130258, 0.27577711),
    **settings: Any,
) -> UDF:
    """Make a UDF that embeds images with a CLIP model in ONNX format. It needs `airflow-geneva[clip]`.

    An input is an encoded image. It is scaled to fill a square and cropped at its center, as CLIP's own preprocessing
    does. An image that cannot be decoded fails its row with a `ValueError`. NULL has no embedding. ONNX Runtime uses a
    GPU where `onnxruntime-gpu` is installed in place of `onnxruntime`.

    Args:
        model: path of the model's vision part (`.onnx`), on each machine where the function runs. Its input has the
            shape images x 3 x `size` x `size`; the output `image_embeds` is used, or else the first one. Give new
            weights a new path: the version covers the path only.
        dimensions: length of the vectors.
        normalize: give vectors of length 1.
        size: width and height of the images that the model takes.
        mean: mean of each channel, red, green and blue, that the model was trained with; the default is CLIP's.
        deviation: standard deviation of each channel, likewise.
        settings: for the decorator `udf`, such as `num_gpus`, `memory` and `on_error`. A call has 32 images
            (`batch_size`), unless you give another number.
    """
    check_whole("dimensions", dimensions)
    check_whole("size", size)
    for setting, value in (("mean", mean), ("deviation", deviation)):
        if not isinstance(value, Sequence) or len(value) != 3:
            raise InvalidInput(f"{setting}={value!r}: give three numbers, for red, green and blue.")
    given = {
        "model": model, "dimensions": dimensions, "normalize": normalize, "size": size, "mean": tuple(mean),
        "deviation": tuple(deviation),
    }  # fmt: skip
    return make(_ClipEmbeddings, pa.list_(pa.float32(), dimensions), given, {"batch_size": 32, **settings})
