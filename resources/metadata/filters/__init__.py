"""MLflow's filter and order language, and pagination; independent of any table."""
