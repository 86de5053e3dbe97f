"""The hub that builds models, and one folder for each model with code of its own."""
