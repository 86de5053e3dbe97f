"""The training loop: parts, order of application, step, hooks."""
