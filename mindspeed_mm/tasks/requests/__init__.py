"""What the commands are asked: one request a command, known before torch is imported."""
