"""plan, apply, commit and finish in one call, in this process or on Spark."""
