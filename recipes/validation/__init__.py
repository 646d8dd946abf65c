"""What a dataset version is like: its contract, its statistics, how it differs from another, and what of it leaked.

The programs `validate` and `find_leaks` measure; what a measure means is the policy's business, which the control plane judges.
"""
