"""Fast path of calls that clients make thousands of times.

`middleware` takes them, `run_logging` parses what they log, `reads` reads runs, metrics and experiments.
"""
