"""``python -m recfx``: see ``recfx/commandline``."""

from __future__ import annotations

import sys

from recfx.commandline.main import main

if __name__ == "__main__":
    sys.exit(main())
