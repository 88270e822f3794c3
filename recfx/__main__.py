"""``python -m recfx``: see ``recfx/commandline``. Ctrl-C ends it with status 130, also before and after that code."""

from __future__ import annotations

import atexit
import os
import signal
import sys

INTERRUPTED = 130


def run() -> int:
    """Run the command line, and return its exit status."""
    # What runs last: from then on, Python would let Ctrl-C kill it, although all is done.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    try:
        from recfx.commandline.main import main  # not above: this takes a while

        return main()
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:  # Python may have to wait for threads that the model's code has started
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))


if __name__ == "__main__":
    sys.exit(run())
