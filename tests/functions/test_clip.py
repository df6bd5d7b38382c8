"""`clip_embeddings`, with small ONNX models that the tests write."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pyarrow as pa
import pytest
from onnx import TensorProto, helper
from PIL import Image

from airflow_geneva import connect
from airflow_geneva.errors import InvalidInput
from airflow_geneva.functions import clip_embeddings
from tests.support.marks import slow_after

PLAIN = {"mean": (0, 0, 0), "deviation": (1, 1, 1)}


def picture(*colors: Sequence[int], size: tuple[int, int] = (40, 20)) -> bytes:
    """Write a PNG with a vertical stripe of each color."""
    pixels = np.zeros((size[1], size[0], 3), np.uint8)
    for at, part in enumerate(np.array_split(np.arange(size[0]), len(colors))):
        pixels[:, part] = colors[at]
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "png")
    return written.getvalue()


def write_model(path: Path, kind: int = TensorProto.FLOAT, output: str = "image_embeds", inputs: int = 1) -> str:
    """Write a model whose vectors are the mean of each channel; another output, which comes first, has the pixels."""
    shape = ["images", 3, "height", "width"]
    names = ["pixel_values", "input_ids"][:inputs]
    graph = helper.make_graph(
        [
            helper.make_node("Identity", ["pixel_values"], ["last_hidden_state"]),
            helper.make_node("ReduceMean", ["pixel_values"], [output], axes=[2, 3], keepdims=0),
        ],
        "clip",
        [helper.make_tensor_value_info(name, kind, shape) for name in names],
        [
            helper.make_tensor_value_info("last_hidden_state", kind, shape),
            helper.make_tensor_value_info(output, kind, ["images", 3]),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    onnx.save(model, str(path))
    return str(path)


@pytest.mark.parametrize("kind", slow_after(1, [TensorProto.FLOAT, TensorProto.FLOAT16]))
def test_images_are_embedded_in_batches_and_only_rows_that_cannot_be_read_fail(tmp_path: Path, kind: int) -> None:
    model = write_model(tmp_path / "clip.onnx", kind)
    pictures = [picture((255, 0, 0)), None, b"no image", picture((0, 255, 51)), picture((255, 255, 255))]
    table = connect(tmp_path / "db").create_table("pictures", pa.table({"image": pa.array(pictures, pa.binary())}))
    made = clip_embeddings(model, 3, **PLAIN, on_error="skip")  # type: ignore[arg-type]
    assert (made.data_type, made.batch_size) == (pa.list_(pa.float32(), 3), 32)
    table.add_columns({"vector": made})
    assert table.backfill("vector", udf=made, runner="inline").rows_failed == 1
    vectors = table.to_arrow()["vector"].to_pylist()
    assert vectors[1] is vectors[2] is None
    found = [vectors[at] for at in (0, 3, 4)]
    np.testing.assert_allclose(found, [[1, 0, 0], [0, 1, 0.2], [1, 1, 1]], atol=1e-3)
    [failed] = table.get_errors()
    assert "8 bytes that begin with b'no image' are no image that Pillow knows" in failed.message


def test_pixels_are_those_that_clip_was_trained_with(tmp_path: Path) -> None:
    model = write_model(tmp_path / "clip.onnx")
    black = pa.array([picture((0, 0, 0))])
    mean, deviation = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    [found] = clip_embeddings(model, 3)(black).to_pylist()
    np.testing.assert_allclose(found, [-one / by for one, by in zip(mean, deviation, strict=True)], rtol=1e-3)

    wide = picture((255, 0, 0), (0, 255, 0), (0, 255, 0), (255, 0, 0), size=(400, 200))
    [middle] = clip_embeddings(model, 3, size=50, **PLAIN)(pa.array([wide])).to_pylist()  # type: ignore[arg-type]
    np.testing.assert_allclose(middle, [0, 1, 0], atol=0.03, err_msg="the center is kept, and both sides are cropped")

    unit = clip_embeddings(model, 3, normalize=True)(black).to_pylist()[0]
    np.testing.assert_allclose(np.linalg.norm(unit), 1, rtol=1e-6)


def test_models_that_do_not_fit_are_named(tmp_path: Path) -> None:
    both = write_model(tmp_path / "both.onnx", inputs=2)
    with pytest.raises(InvalidInput, match="has the inputs pixel_values, input_ids, and only an image is given"):
        _ = clip_embeddings(both).function
    image = pa.array([picture((0, 0, 0))])
    hidden = write_model(tmp_path / "hidden.onnx", output="pooled")
    with pytest.raises(ValueError, match=r"'last_hidden_state' of the model has the shape \(1, 3, 224, 224\)"):
        clip_embeddings(hidden, 3)(image)
    with pytest.raises(ValueError, match="vectors of 3 numbers, and dimensions=512"):
        clip_embeddings(write_model(tmp_path / "clip.onnx"))(image)


def test_the_version_follows_what_changes_the_vectors_and_bad_parameters_are_named() -> None:
    made = [clip_embeddings("a"), clip_embeddings("b"), clip_embeddings("a", 3), clip_embeddings("a", normalize=True)]
    made += [clip_embeddings("a", size=336), clip_embeddings("a", mean=(0, 0, 0)), clip_embeddings("a", **PLAIN)]  # type: ignore[arg-type]
    assert len({one.code_version for one in made}) == len(made)
    assert clip_embeddings("a", batch_size=1).code_version == made[0].code_version
    for wrong, named in (
        ({"size": 0}, "size=0"),
        ({"mean": 0.5}, "mean=0.5"),
        ({"deviation": (1, 2)}, r"deviation=\(1, 2\)"),
    ):
        with pytest.raises(InvalidInput, match=named):
            clip_embeddings("a", **wrong)  # type: ignore[arg-type]
