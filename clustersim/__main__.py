"""``python -m clustersim``."""

from clustersim.cli import main

if __name__ == "__main__":
    main()
