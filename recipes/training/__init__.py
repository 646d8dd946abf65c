"""The program train: data, model, loop and callbacks, checkpoints, publishing.

What only training needs belongs here; what evaluation or preparation share with it stands in the folders beside it.
"""
