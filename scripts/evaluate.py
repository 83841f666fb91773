"""Evaluate a trained model. Options: python scripts/evaluate.py --help"""

import sys

from minitx.cli import minitx_evaluate

if __name__ == "__main__":
    sys.exit(minitx_evaluate())
