"""`mm data`: what is in the rows of a configuration, before anything is trained on them."""
