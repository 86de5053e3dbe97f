"""Empty: attention over several ranks is a plan (`parallel.ring_attention_size`)."""
