"""Training metrics: measurement, aggregation and logging."""
