"""Whole runs of the command, with real processes."""
