"""`mm verify`: a plan against one process."""
