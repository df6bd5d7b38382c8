"""Buttons on the pages of tasks."""
