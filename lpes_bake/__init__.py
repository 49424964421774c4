"""lpes-bake: find layer-specific RoPE scaling factors (LPES) and bake them into a checkpoint."""

__version__ = "0.1.0"
