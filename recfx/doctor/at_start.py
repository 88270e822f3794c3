"""The first that ``import recfx`` imports: if it is for ``python -m recfx doctor``, it looks for what is missing."""

import sys

from recfx.doctor.early import look_first

look_first(sys.orig_argv)
