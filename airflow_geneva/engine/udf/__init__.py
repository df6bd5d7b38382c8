"""UDFs, their definitions in column metadata, and their transfer to other processes."""

from __future__ import annotations

from airflow_geneva.engine.udf import expect
from airflow_geneva.engine.udf.decorator import UDF, udf
from airflow_geneva.engine.udf.error_policy import Fail, Retry, Skip
from airflow_geneva.engine.udf.settings import UdfDefinition
from airflow_geneva.engine.udf.shipping import load_udf
from airflow_geneva.engine.udf.stored import load_stored_udf

__all__ = ["UDF", "Fail", "Retry", "Skip", "UdfDefinition", "expect", "load_stored_udf", "load_udf", "udf"]
