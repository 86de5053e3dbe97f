"""Models: the hub that builds them and one folder for each model with code of its own."""
