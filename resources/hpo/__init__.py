"""Hyperparameter search (rows K1-K7): what a sweep is, and pure functions that decide what it does next.

The rows of a sweep's trials are all that there is to know of it: whoever looks at them decides the same, so any process may
die at any moment and any other goes on.
"""
