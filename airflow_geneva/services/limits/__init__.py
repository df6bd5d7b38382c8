"""Limits of a service that calls of many processes keep together, and what calls report that they used."""
