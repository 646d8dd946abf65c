"""Validate dataset versions: contract, statistics, drift and leakage.

The programs `validate` and `find_leaks` measure; the control plane evaluates the results by the dataset's policy.
"""
