"""What a configuration does to a model, resolved once and applied once."""
