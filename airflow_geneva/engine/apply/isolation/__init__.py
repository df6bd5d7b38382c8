"""Run a UDF in a process of its own, which may die."""
