"""Empty: checkpoints are always distributed ones."""
