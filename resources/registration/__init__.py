"""Register what a run or a client made as a model version."""
