"""``python -m recfx``: its options, and what its commands do."""


class UsageError(Exception):
    """A command line gives no model, or its options do not fit.

    The message is one line, which is shown; the cause, if there is one, is what the user's code raised.
    """
