"""Fast path of calls that clients make thousands of times.

`middleware` dispatches them, `run_logging` parses logging calls, `reads` reads runs, metrics and experiments.
"""
