"""The HTTP server: validate, call `resources`, answer. No state of its own, no Dagster, no machine learning library."""
