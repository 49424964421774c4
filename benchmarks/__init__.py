"""Measurements, each one command that prints a table. Ratios are taken side by side in one run."""
