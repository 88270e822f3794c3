"""The first that ``import recfx`` imports: if it is for ``python -m recfx doctor``, it looks for what is missing.

Nothing else is imported for it, because every other program waits for it, too.
"""

import sys

if "doctor" in sys.orig_argv:
    from recfx.doctor.early import look_first

    look_first(sys.orig_argv)
