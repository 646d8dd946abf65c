"""Score a model on held-out records."""
