"""What versions cost: the bytes of one that changes little of a large corpus, and what many files add to each thing."""
