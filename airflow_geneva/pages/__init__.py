"""Pages inside the Airflow UI: jobs, and the freshness of tables and views."""
