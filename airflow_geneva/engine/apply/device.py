"""Recognize exceptions about a device: out of memory, and a failed device."""

from __future__ import annotations

import os
import re
import socket
import traceback
from typing import TYPE_CHECKING

from airflow_geneva.errors import DeviceFailed

if TYPE_CHECKING:
    from airflow_geneva.engine.failures import CallFailure

_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|OOM when allocating|RESOURCE_EXHAUSTED|CU[A-Z]+_STATUS_ALLOC_FAILED", re.IGNORECASE
)
"""Texts of exceptions of PyTorch, JAX, TensorFlow and CUDA when a device is out of memory."""

_FAILED = re.compile(
    r"(?:CUDA|HIP)(?: driver| runtime)? error: (?!out of memory)|CUDA_ERROR_(?!OUT_OF_MEMORY)|uncorrectable ECC"
    r"|CUDNN_STATUS_EXECUTION_FAILED|CUBLAS_STATUS_EXECUTION_FAILED",
    re.IGNORECASE,
)
"""Their texts when a device, or this process's access to it, has failed, so that all later calls on it fail too."""


def is_out_of_memory(error: BaseException, named: tuple[type[Exception], ...] = ()) -> bool:
    """Whether an exception says that the device has no memory left, or is one of the UDF's `out_of_memory`."""
    return isinstance(error, named) or _OUT_OF_MEMORY.search(f"{type(error).__name__}: {error}") is not None


def is_device_failure(text: str) -> bool:
    """Whether an exception's text says that a device failed."""
    return _FAILED.search(text) is not None


def device_failed(why: CallFailure | str) -> DeviceFailed:
    """Return an error that names this process's host and device; later calls in this process would fail too."""
    device = os.environ.get("CUDA_VISIBLE_DEVICES") or "all"
    text = why if isinstance(why, str) else f"{why.name}: {why.message}"
    return DeviceFailed(f"The device of host {socket.gethostname()}, CUDA_VISIBLE_DEVICES={device}, failed. {text}")


def release(error: BaseException | None) -> None:
    """Release the objects in an exception's frames, such as the tensors of a call that is repeated with fewer rows."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
