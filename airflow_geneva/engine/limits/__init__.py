"""Limits of a service that many processes share, and the usage that calls report."""
