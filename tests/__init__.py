"""Tests of lpes-bake."""
