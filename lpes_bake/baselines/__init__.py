"""The methods that LPES is compared with, each in a file of its own. docs/baselines.md says what each of them does."""
