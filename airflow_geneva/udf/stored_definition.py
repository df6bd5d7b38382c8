"""The stored definition of a UDF, kept in the metadata of the column that it computes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    from airflow_geneva.udf.signature import Form

_FORMAT = 1


@dataclass(frozen=True)
class UdfDefinition:
    """The stored definition of a UDF: plain values, no code; `data_type` is text for display."""

    name: str
    version: str
    import_path: str | None
    input_columns: tuple[str, ...] | None
    data_type: str
    form: Form
    num_cpus: float | None = None
    num_gpus: float | None = None
    memory: int | None = None
    batch_size: int | None = None
    checkpoint_size: int | None = None
    min_checkpoint_size: int | None = None
    max_checkpoint_size: int | None = None
    on_error: str | list[dict[str, Any]] = "fail"
    timeout: float | None = None

    def to_json(self) -> str:
        """Return the definition as JSON with sorted keys, without None values."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps({"format": _FORMAT, **values}, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> UdfDefinition:
        """Parse the output of `to_json`; `InvalidInput` if it is something else, or of a later format."""
        try:
            values = json.loads(text)
            found = values.pop("format")
            if found != _FORMAT:
                raise InvalidInput(
                    f"A UDF definition has format {found!r}; this version of airflow-geneva reads format "
                    f"{_FORMAT}. Upgrade airflow-geneva."
                )
            for name in ("import_path", "input_columns"):
                values.setdefault(name, None)
            if values["input_columns"] is not None:
                values["input_columns"] = tuple(values["input_columns"])
            return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})
        except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise InvalidInput(f"This is not a stored UDF definition ({error!r}): {text!r:.200}") from error
