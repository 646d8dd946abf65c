"""Messages of MLflow's REST API."""
