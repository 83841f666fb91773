"""View the attention of a model in a browser. Options: python scripts/view_attention.py --help"""

import sys

from minitx.cli import minitx_view

if __name__ == "__main__":
    sys.exit(minitx_view())
