"""Register the result of a run, or a client's model, as a model version."""
