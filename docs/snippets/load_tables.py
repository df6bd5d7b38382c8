from pathlib import Path

from airflow_geneva import connect

table = connect("library").open_table("docs")

# --8<-- [start:iceberg]
from pyiceberg.catalog import load_catalog

catalog = load_catalog("warehouse", uri="sqlite:///warehouse.db", warehouse=Path("warehouse").absolute().as_uri())
print(table.load_columns(catalog.load_table("sales.prices"), on="id").rows_loaded)  # 2
# --8<-- [end:iceberg]

# --8<-- [start:spark]
from pyspark.sql import SparkSession

spark = SparkSession.builder.getOrCreate()
ranks = spark.table("clicks").groupBy("id").count().withColumnRenamed("count", "clicks")
print(table.load_columns(ranks, on="id").rows_loaded)  # 3

table.load_columns("default.ratings", on="id", columns=["stars"], format="spark")
# --8<-- [end:spark]
