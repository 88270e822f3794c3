"""The two files of a report: each as a whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from recfx.doctor.report import Report
from recfx.doctor.show import to_html
from recfx.kernels.build.private_files import new_file

NAME = "recfx-doctor"


def stem_of(out: Path) -> Path:
    """The path of the two files without its end: ``out``, or ``recfx-doctor`` in it if it is a directory.

    Raises:
        OSError: no file can be made there.
    """
    stem = out / NAME if out.is_dir() else out
    if not stem.parent.is_dir():
        raise NotADirectoryError(f"there is no directory {stem.parent}: create it, or pass another path")
    if not os.access(stem.parent, os.W_OK):
        raise PermissionError(f"no file can be made in {stem.parent}: pass another path")
    return stem


def write(report: Report, stem: Path) -> list[Path]:
    """Write ``<stem>.html`` and ``<stem>.json``, and return their paths.

    Raises:
        OSError: they cannot be written. What was there before is as it was.
    """
    texts = {".html": to_html(report), ".json": report.to_json() + "\n"}
    files = {stem.with_name(f"{stem.name}{end}"): text for end, text in texts.items()}
    for path, text in files.items():
        with new_file(path) as file:
            file.path.write_text(text, encoding="utf-8", errors="backslashreplace")
            file.put_in_place()
    return list(files)
