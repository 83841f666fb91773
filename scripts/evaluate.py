"""Evaluate a trained model. Options: python scripts/evaluate.py --help"""

import sys

from minitx.cli.evaluate import main

if __name__ == "__main__":
    sys.exit(main())
