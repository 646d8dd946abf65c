"""What requests log to runs, thousands of times a second: many in one transaction, or one the shortest way."""
