"""``python -m precache``."""

import sys

from precache.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
