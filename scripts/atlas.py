"""Make a report of what each attention head does. Options: python scripts/atlas.py --help"""

import sys

from minitx.cli.atlas import main

if __name__ == "__main__":
    sys.exit(main())
