"""Commands and files at the paths that launch scripts name."""
