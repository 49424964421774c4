"""What LPES is compared with: other ways to make a model read all places of a prompt."""
