"""The first that ``import recfx`` imports: whether the packages that are installed fit. They are not imported for it.

If ``import recfx`` is for ``python -m recfx doctor``, that reports what is missing.
"""

import sys

from recfx.doctor.installed_set import refused

_refused = refused()
if "doctor" in sys.orig_argv:
    from recfx.doctor.early import look_first

    look_first(sys.orig_argv, _refused is not None)
if _refused is not None:
    if sys.orig_argv[1:3] == ["-m", "recfx"]:
        sys.exit(f"python -m recfx: {_refused}")
    raise _refused
