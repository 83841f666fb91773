"""Show what each attention head does. Options: python scripts/heads.py --help"""

import sys

from minitx.cli.heads import main

if __name__ == "__main__":
    sys.exit(main())
