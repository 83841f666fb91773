"""Count the parameters, FLOPs and memory of a model. Options: python scripts/cost.py --help"""

import sys

from minitx.cli.cost import main

if __name__ == "__main__":
    sys.exit(main())
