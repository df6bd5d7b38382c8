"""Find out what is left to compute, and why."""
