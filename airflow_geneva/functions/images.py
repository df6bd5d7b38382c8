"""Decode images and resize them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from airflow_geneva.engine.udf import UDF
from airflow_geneva.errors import InvalidInput
from airflow_geneva.functions.made import check_choice, check_whole, library, make

_CHANNELS = {"RGB": 3, "RGBA": 4, "L": 1}


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
        try:
            with self.pillow.open(io.BytesIO(image)) as opened:
                upright = self.in_mode(self.operations.exif_transpose(opened))
        except self.pillow.UnidentifiedImageError as error:
            raise ValueError(
                f"{len(image):,} bytes that begin with {image[:8]!r} are no image that Pillow knows."
            ) from error
        except (
            OSError,
            EOFError,
            SyntaxError,
            RuntimeError,
            AttributeError,
            self.pillow.DecompressionBombError,
        ) as error:
            raise ValueError(f"The image of {len(image):,} bytes cannot be decoded: {error}") from error
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

    def in_mode(self, image: Any) -> Any:
        if image.mode.startswith("I;16"):  # Pillow's own conversion turns all but the darkest 256 levels white
            image = image.convert("I").point(lambda level: level * (1 / 257)).convert("L")
        elif image.mode in ("I", "F"):
            raise ValueError(
                "The image has pixels of 32 bits, and does not say which value is white. Convert it before."
            )
        return image.convert(self.mode)


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
