"""Benchmark of the tracking server against `mlflow server` and FastTrackML.

All servers get the same calls from one load generator, in interleaved rounds. `python -m benchmarks.tracking --help`, or
`make bench-tracking` for everything.
"""
