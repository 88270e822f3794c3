"""``python -m recfx``: see ``recfx/commandline``. Ctrl-C ends it with status 130."""

import sys

INTERRUPTED = 130


def run() -> int:
    """Run the command line, and return its exit status."""
    try:
        from recfx.commandline.main import main  # not above: this takes a while

        return main()
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(run())
