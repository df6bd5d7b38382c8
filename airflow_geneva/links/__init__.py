"""Extra links: buttons on Airflow's task pages."""
