"""Hyperparameter search: sweeps, and the pure functions that decide their next steps.

The rows of a sweep's trials are its complete state: every process that reads them makes the same decisions, so any process
may be killed at any moment, and any other continues.
"""
