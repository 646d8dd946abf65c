"""HTTP routes: MLflow's REST API, the specification's /v1 and the web UI."""
