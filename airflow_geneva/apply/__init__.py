"""Compute it: read a range, map it, keep checkpoints."""
