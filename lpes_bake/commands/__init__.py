"""One module a command, each with its options and nothing else: the work is done a level up.

No module here imports torch, transformers or matplotlib at its top: `--help` must stay instant.
"""
