"""Write a checkpoint as a Hugging Face folder. Options: python scripts/export.py --help"""

import sys

from minitx.cli import minitx_export

if __name__ == "__main__":
    sys.exit(minitx_export())
