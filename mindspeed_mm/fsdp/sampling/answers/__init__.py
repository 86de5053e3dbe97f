"""Answers of language models: questions as training shows them, generation in batches, and scores."""
