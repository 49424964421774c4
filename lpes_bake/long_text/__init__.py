"""Benchmarks of questions about long texts, answered in free text: ZeroSCROLLS and L-Eval."""
