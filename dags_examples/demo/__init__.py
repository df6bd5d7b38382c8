"""`make demo`: a real text, embedded by Airflow and Spark in three runs."""
