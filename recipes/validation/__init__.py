"""What a dataset version is like: its contract, its statistics, how it differs from another, and what of it leaked.

The programs `validate` and `find_leaks` measure. What a measure means, the control plane judges by the dataset's policy.
"""
