"""MLflow's REST API, in MLflow's words. Every route here is served below /api/2.0 and below /ajax-api/2.0."""
