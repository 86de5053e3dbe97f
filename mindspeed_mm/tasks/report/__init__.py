"""`mm report`: a run on one page."""
