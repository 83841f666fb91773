"""Count what a model costs: python scripts/cost.py --help"""

import sys

from minitx.cli.cost import main

if __name__ == "__main__":
    sys.exit(main())
