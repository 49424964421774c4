"""The Python files that ship inside a baked checkpoint, word for word."""
