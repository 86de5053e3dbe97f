"""What makes a step faster and leaves its results alone."""
