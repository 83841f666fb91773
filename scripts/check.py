"""Check a function or a layer of attention. Options: python scripts/check.py --help"""

import sys

from minitx.cli import minitx_check

if __name__ == "__main__":
    sys.exit(minitx_check())
