"""Generate text with a trained model. Options: python scripts/generate.py --help"""

import sys

from minitx.cli import minitx_generate

if __name__ == "__main__":
    sys.exit(minitx_generate())
