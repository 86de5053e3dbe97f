"""`mm evaluate`: scores of answers, and the loss of each row."""
