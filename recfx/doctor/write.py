"""The two files of a report: each as a whole, or not at all."""

from __future__ import annotations

from pathlib import Path

from recfx.doctor.report import Report
from recfx.doctor.show import to_html
from recfx.kernels.build.private_files import new_file

NAME = "recfx-doctor"


def write(report: Report, out: Path) -> list[Path]:
    """Write ``<out>.html`` and ``<out>.json``, and return their paths.

    Args:
        report: see ``Report``.
        out: a directory that exists, in which they get the name ``recfx-doctor``; or else their path without its end.

    Raises:
        OSError: they cannot be written. What was there before is as it was.
    """
    stem = out / NAME if out.is_dir() else out
    texts = {".html": to_html(report), ".json": report.to_json() + "\n"}
    files = {stem.with_name(f"{stem.name}{end}"): text for end, text in texts.items()}
    for path, text in files.items():
        with new_file(path) as file:
            file.path.write_text(text, encoding="utf-8", errors="backslashreplace")
            file.put_in_place()
    return list(files)
