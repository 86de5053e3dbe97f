"""Parts that the models of the provider API share."""
