"""Pages inside the Airflow UI: what jobs did and do, and how tables and views stand."""
