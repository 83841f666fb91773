"""Train a model, or run a grid: python scripts/train.py --help"""

import sys

from minitx.cli.train import main

if __name__ == "__main__":  # the grid's workers import this file
    sys.exit(main())
