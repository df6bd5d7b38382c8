"""`make demo`: Airflow and Spark embed a real text in three runs."""
