"""The first that ``import recfx`` imports: whether the packages that are installed fit. They are not imported for it.

If ``import recfx`` is for ``python -m recfx doctor``, that reports what is missing.
"""

import sys

from recfx.doctor.installed_set import refused
from recfx.doctor.own_command import own_arguments

_refused, _arguments = refused(), own_arguments(sys.orig_argv, getattr(sys, "argv", []))
if _arguments is not None and _arguments[:1] == ["doctor"]:
    from recfx.doctor.early import look_first

    look_first(_arguments[1:], _refused is not None)
if _refused is not None:
    if _arguments is not None:
        sys.exit(f"recfx: {_refused}")
    raise _refused
