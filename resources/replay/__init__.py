"""Repeat a finished run from its record alone, and compare the results."""
