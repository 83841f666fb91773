"""Train a model, or run an ablation grid. Options: python scripts/train.py --help"""

import sys

from minitx.cli.train import main

if __name__ == "__main__":  # the workers of a grid import this file
    sys.exit(main())
