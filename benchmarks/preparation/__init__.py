"""Benchmark of dataset preparation against `datasets.map`, datatrove and lower bounds."""
