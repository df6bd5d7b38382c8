"""What is left to compute, and why."""
