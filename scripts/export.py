"""Write a checkpoint as a Hugging Face folder. Options: python scripts/export.py --help"""

import sys

from minitx.cli.export import main

if __name__ == "__main__":
    sys.exit(main())
