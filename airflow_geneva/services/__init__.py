"""Calls of model services: their limits and their usage."""
