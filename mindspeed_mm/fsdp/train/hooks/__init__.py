"""What happens around steps: checkpoints, validation, logs, samples, profiles."""
