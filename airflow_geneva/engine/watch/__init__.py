"""Whether a table has rows that a reader has not seen."""
