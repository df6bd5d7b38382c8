"""Whether a UDF's code is still the same."""
