"""Plan, compute and commit columns and views; imports Arrow and Lance, but neither Airflow nor Spark."""
