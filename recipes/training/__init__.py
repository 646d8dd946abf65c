"""What the program train is made of: rows, the model, the loop and its callbacks, checkpoints, what is published.

What belongs here: anything that only training needs. What does not: what evaluation or preparation share with it, which
lies beside this folder.
"""
