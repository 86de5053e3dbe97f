"""`mm extract`: features of frozen encoders, computed once and kept."""
