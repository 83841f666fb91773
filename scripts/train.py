"""Train a model, or run an ablation grid. Options: python scripts/train.py --help"""

import sys

from minitx.cli import minitx_train

if __name__ == "__main__":  # the workers of a grid import this file
    sys.exit(minitx_train())
