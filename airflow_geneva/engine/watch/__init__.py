"""Detect rows of a table that a reader has not read yet."""
