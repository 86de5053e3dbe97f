"""`mm evaluate --generated`: how good generated pictures are."""
