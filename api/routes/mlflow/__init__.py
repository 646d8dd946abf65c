"""MLflow's REST API below /api/2.0 and /ajax-api/2.0, as of release 3.17.2.

docs/from-mlflow.md lists the differences.
"""
