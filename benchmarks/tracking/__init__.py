"""The tracking server against `mlflow server` and FastTrackML: the same calls, one load generator, interleaved rounds.

`python -m benchmarks.tracking --help`, or `make bench-tracking` for everything.
"""
