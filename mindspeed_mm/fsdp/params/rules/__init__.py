"""What may not be combined, and which values are out of range: a rule a line, each told with its key."""
