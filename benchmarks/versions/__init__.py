"""Cost of dataset versions: storage of a small change, and operations on many files."""
