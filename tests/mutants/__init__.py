"""Remove guards of the engine one at a time, and check that a test notices each removal: ``make mutants``."""
