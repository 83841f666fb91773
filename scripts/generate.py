"""Generate text with a trained model. Options: python scripts/generate.py --help"""

import sys

from minitx.cli.generate import main

if __name__ == "__main__":
    sys.exit(main())
