"""The query of a materialized view, and its columns."""
