"""What plans, computes and commits columns and views: needs Arrow and Lance, and neither Airflow nor Spark."""
