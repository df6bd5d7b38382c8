"""The command `airflow-geneva`."""
