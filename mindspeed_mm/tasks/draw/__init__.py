"""Images and videos by a generator."""
