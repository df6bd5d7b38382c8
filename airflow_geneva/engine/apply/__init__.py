"""Compute rows: read a range, call the UDF, write checkpoints."""
