from airflow.sdk import DAG, Param

from airflow_geneva.task_groups import BackfillTaskGroup

# --8<-- [start:answer]
with DAG("docs_words", schedule=None, params={"values": Param("error", enum=["error", "adopt", "fill", "recompute"])}):
    BackfillTaskGroup(table="docs", column="words", on_unknown_values="{{ params['values'] }}")
# --8<-- [end:answer]
