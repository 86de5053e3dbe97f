"""Features that save memory."""
