"""View the attention of a model in a browser. Options: python scripts/view_attention.py --help"""

import sys

from minitx.cli.view import main

if __name__ == "__main__":
    sys.exit(main())
