"""Training data: examples, packing, sampling order, prefetch."""
