"""Job records, progress, results."""
