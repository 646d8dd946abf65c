"""Fast path of calls that clients make thousands of times.

`middleware` takes them, `logging_bodies` parses what they log, `reads` reads runs, metrics and experiments.
"""
