"""HTTP server: validate requests, call `resources`, respond.

Holds no state and imports neither Dagster nor a machine learning library.
"""
