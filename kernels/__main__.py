"""``python -m recfx.kernels`` builds the C++ library before its first use and prints its path."""

import sys

from recfx.kernels.build.library import main

sys.exit(main())
