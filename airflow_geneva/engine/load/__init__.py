"""Sources of values that others computed, and their join with a table's keys."""
