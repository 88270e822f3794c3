"""The error of a command line that gives no model, or whose options do not fit."""


class UsageError(Exception):
    """The message is one line, which is shown; the cause, if there is one, is what the user's code raised."""
