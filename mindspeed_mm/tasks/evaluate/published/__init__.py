"""Published sets of questions: read from the files as their authors give them out, scored by their authors' rules."""
