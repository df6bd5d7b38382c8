"""Benchmark airflow_geneva against pylance alone, in one run on one machine: ``python -m bench``."""
