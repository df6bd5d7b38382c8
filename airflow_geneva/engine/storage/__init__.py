"""Locations of files, the credentials to reach them, and timeouts."""
