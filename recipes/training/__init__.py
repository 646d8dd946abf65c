"""The training program: data, model, training loop and callbacks, checkpoints, publishing.

Code that evaluation or preparation share with training belongs in the neighbouring packages, not here.
"""
