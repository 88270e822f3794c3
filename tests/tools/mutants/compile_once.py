"""``compile_once.py KEPT COMPILER ARGUMENT...``: a compiler that keeps what it has compiled, in the directory KEPT.

The key of an object file is the command and the text of its source with all that it includes in quotes: of a library
with one changed file, only the files that include it are compiled. This file imports nothing of the project's.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


def included_by(source: Path) -> list[Path]:
    """The source and what it includes in quotes, directly and indirectly, each file once."""
    included: list[Path] = []
    left = [source]
    while left:
        path = left.pop()
        if path not in included and path.exists():
            included.append(path)
            folders = (path.parent, path.parent.parent)  # its own, and that of all sources
            left += [folder / name for name in _INCLUDE.findall(path.read_text()) for folder in folders]
    return sorted(included)


def main(kept: Path, command: list[str]) -> int:
    """Run the compiler, unless it has run for the same input; its exit status."""
    if "-c" not in command:
        return subprocess.run(command, check=False).returncode
    source, target = Path(command[command.index("-c") + 1]), Path(command[command.index("-o") + 1])
    key = hashlib.sha256("\0".join(argument for argument in command if argument != str(target)).encode())
    for path in included_by(source):
        key.update(f"\0{path}\0".encode() + path.read_bytes())
    known = kept / f"{key.hexdigest()}.o"
    if not known.exists():
        if status := subprocess.run(command, check=False).returncode:
            return status
        part = kept / f"{known.name}.{target.parent.name}.part"
        shutil.copy2(target, part)
        part.replace(known)
    shutil.copy2(known, target)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
