"""Look at a model's attention: python scripts/view_attention.py --help"""

import sys

from minitx.cli.view import main

if __name__ == "__main__":
    sys.exit(main())
