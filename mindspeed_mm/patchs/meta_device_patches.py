"""Empty: models are always built without storage first."""
