"""Pages of the documentation, and the program that generates some of them."""
