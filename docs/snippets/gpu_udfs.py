# --8<-- [start:example]
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva import udf


def length(text: pa.StringArray) -> pa.Array:
    return pc.binary_length(text)


@udf(
    data_type=pa.list_(pa.float32(), 384),
    num_gpus=1,
    num_cpus=2,
    memory="8g",
    batch_by=length,
    batch_limit=65_536,
)
class Embed:
    def __init__(self) -> None:  # once per process
        from sentence_transformers import SentenceTransformer

        self.model = SentenceTransformer("all-MiniLM-L6-v2", device="cuda")

    def __call__(self, text: pa.StringArray) -> np.ndarray:
        return self.model.encode(text.to_pylist(), batch_size=len(text))


# --8<-- [end:example]
