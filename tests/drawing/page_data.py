"""What a page holds."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any


def data_of(path: Path) -> dict[str, Any]:
    """The data in a page."""
    packed = re.search(r'id="data">([^<]*)</script>', path.read_bytes().decode())
    assert packed is not None
    found: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    return found
