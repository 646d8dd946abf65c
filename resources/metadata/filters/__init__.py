"""MLflow's filters and orders, and pages of what they find. Nothing in here knows a table."""
