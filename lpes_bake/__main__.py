"""`python -m lpes_bake` is the command `lpes-bake`."""

from lpes_bake.cli import main

if __name__ == "__main__":
    main()
