"""The paper's tables as recipes: lists of commands, and the measurements that no command of lpes-bake makes."""
