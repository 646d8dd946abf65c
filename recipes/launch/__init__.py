"""Components of `recipes.launcher`, the first process of every pod of a gang."""
