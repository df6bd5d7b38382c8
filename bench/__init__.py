"""Measure airflow_geneva beside pylance alone, in one run on one machine: ``python -m bench``."""
