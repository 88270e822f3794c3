"""``RECFX_TRACE=directory``: what each conversion did, as files to read or to attach to a bug report.

Every conversion in every process has a folder of its own: ``001-DLRM``, or ``001-DLRM-rank-0`` where there are several
ranks. Files hold graphs, reports, versions and times; no weights and no ids. Each file is written as a whole or not at
all, and the index page of a folder comes last, so that a folder without one belongs to a conversion that was stopped.

Tracing never stops a conversion, because other ranks may be converting as well: what cannot be written is a warning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
import torch.distributed as dist
from torch import nn

from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.whole_graph import WholeGraph
from recfx.collections.wrappers import unwrap
from recfx.errors import ConversionError, RecfxError
from recfx.inspect import diff_steps, wording
from recfx.inspect.drawing.draw import draw, write_text
from recfx.inspect.explain import explain
from recfx.inspect.step_diff import graph_texts, pass_records, step_names
from recfx.ir import format_graph
from recfx.versions import __version__

_CONVERSIONS = "Conversions"
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 60em; padding: 0 1em; }
table { border-collapse: collapse; margin: .5em 0 1.5em; }
th, td { border: 1px solid #999; padding: .2em .6em; text-align: left; }
td.number { text-align: right; }
"""


def index_page(
    title: str,
    outcome: str,
    versions: Mapping[str, object],
    seconds: Mapping[str, float],
    files: Sequence[tuple[str, str]],
) -> str:
    """The page of one conversion.

    Args:
        title: the name of its folder.
        outcome: how it ended.
        versions: what it ran under.
        seconds: the times of its stages.
        files: name and description of each file in the folder.
    """
    total = sum(seconds.values())
    times = "".join(
        f'<tr><td>{escape(name)}</td><td class="number">{took:.3f}</td></tr>' for name, took in seconds.items()
    )
    parts = [f"<h1>{escape(title)}: {escape(outcome)}</h1>"]
    parts.append(f"<p>{escape(', '.join(f'{name} {value}' for name, value in versions.items()))}</p>")
    rows = "".join(f"<tr><td>{_link(name)}</td><td>{escape(description)}</td></tr>" for name, description in files)
    parts.append(f"<h2>Files</h2><table><tr><th>file</th><th>what is in it</th></tr>{rows}</table>")
    if times:
        parts.append(f"<h2>Times: {total:.3f} s</h2><table><tr><th>stage</th><th>seconds</th></tr>{times}</table>")
    parts.append("<p>There are no weights and no ids in these files.</p>")
    return _page(title, parts)


def index_of_all(folders: Sequence[str]) -> str:
    """The page above the folders of all conversions."""
    rows = "".join(f"<li>{_link(f'{folder}/index.html', folder)}</li>" for folder in folders)
    return _page(_CONVERSIONS, [f"<h1>{_CONVERSIONS}</h1><ul>{rows}</ul>"])


def is_index_of_all(page: str) -> bool:
    """Whether it is a page of ``index_of_all``, and not one that someone else has written."""
    return page.startswith(_head(_CONVERSIONS))


def _link(path: str, text: str = "") -> str:
    return f'<a href="{escape(quote(path))}">{escape(text or path)}</a>'


def _page(title: str, parts: Sequence[str]) -> str:
    return f"{_head(title)}<style>{_STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"


def _head(title: str) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="generator" content="recfx">'
        f"<title>{escape(title)}</title>"
    )


VARIABLE = "RECFX_TRACE"

_FOLDER = re.compile(r"\d{3,}-")
_SAID = re.compile(r"raises ([\w.]+): .*", re.DOTALL)
_READ_FROM_A_TABLE = re.compile(r"\b(its ids(?: are)?) -?\d+ to -?\d+(?=.*\bvalues of )", re.DOTALL | re.IGNORECASE)
_LEFT_OUT = "(what it says is left out here: it may quote the batch)"


class TraceWarning(UserWarning):
    """The trace of a conversion could not be written; the conversion itself is not affected."""


class ConversionTrace:
    """The folder of one conversion.

    Args:
        folder: where to write; it exists, and is empty.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[tuple[str, str]] = []
        self.seconds: dict[str, float] = {}  # of each stage
        self._since = time.perf_counter()

    @classmethod
    def begin(cls, model: nn.Module) -> ConversionTrace | None:
        """A new folder below the directory that ``RECFX_TRACE`` names; None if it is not set, or cannot be written."""
        directory = os.environ.get(VARIABLE, "")
        if not directory:
            return None
        try:
            top = Path(directory).expanduser()  # not every way to set a variable goes through a shell
            top = top.absolute()  # the model's own code may change the directory
            top.mkdir(parents=True, exist_ok=True)
            return cls(_new_folder(top, _name_of(model)))
        except (OSError, RuntimeError) as error:  # the latter: there is no such home
            why = getattr(error, "strerror", None) or error
            _warn(f"{VARIABLE}={directory} cannot be written ({why}): nothing is traced")
            return None

    def done(self, stage: str) -> None:
        """Count the time since the last stage ended for this one."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._since
        self._since = now

    def ready(self, converted: nn.Module, collections: Mapping[str, ConvertedCollection]) -> None:
        """What is written comes last."""

    def result(self, converted: nn.Module) -> None:
        """Write what the conversion made."""
        with self._warning():
            report = without_quotes(explain(converted))
            self._write("report.txt", f"{report}\n", "the report")
            steps = step_names(converted)
            self._write("report.html", report.to_html("graph.html" if len(steps) > 1 else ""), "the report as a page")
            self._write("report.json", report.to_json(), "the report for programs")
            if len(steps) > 1:
                whole = "the graphs before and after, pass by pass"
                self._file("graph.html", whole, lambda path: draw(converted, path, report="report.html"))
                self._passes(converted, steps)
            for name, text in _whole_graphs(converted).items():
                self._write(name, text, "the graph of the whole model in that mode")
            self._finish(converted, "converted")

    def failure(self, error: BaseException) -> None:
        """Write why there is no result."""
        with self._warning():
            self._write("error.txt", _error_text(error), "why the conversion failed")
            reason = f" ({error.reason})" if isinstance(error, RecfxError) else ""
            self._finish(None, f"failed: {type(error).__name__}{reason}")

    def _passes(self, converted: nn.Module, steps: tuple[str, ...]) -> None:
        (self.folder / "passes").mkdir()
        for number, step in enumerate(steps):
            parts = [f"# {wording.name_of(path)}\n{text}\n" for path, text in graph_texts(converted, step).items()]
            when = step if number == 0 else f"after {step}"
            self._write(f"passes/{number:02d}-{step}.txt", "\n".join(parts), f"the graphs {when}")
            if number and (changed := diff_steps(converted, steps[number - 1], step)):
                self._write(f"passes/{number:02d}-{step}.diff", changed, f"what {step} changed")

    def _finish(self, converted: nn.Module | None, outcome: str) -> None:
        passes = {} if converted is None else pass_records(converted)
        seconds = {path: {record.name: record.seconds for record in records} for path, records in passes.items()}
        times = {"stages": self.seconds, "passes": seconds}
        self._write("timings.json", json.dumps(times, indent=2) + "\n", "seconds of each stage, and of each pass")
        versions = _versions()
        self._write("versions.json", json.dumps(versions, indent=2) + "\n", "versions, and the rank")
        page = index_page(self.folder.name, outcome, versions, self.seconds, self.files)
        self._write("index.html", page, "")
        _list_all(self.folder.parent)

    def _write(self, name: str, text: str, description: str) -> None:
        self._file(name, description, lambda path: write_text(path, text))

    def _file(self, name: str, description: str, write: Callable[[Path], object]) -> None:
        write(self.folder / name)
        if description:
            self.files.append((name, description))

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever it is, the conversion itself is not affected
            _warn(f"the trace of a conversion in {self.folder} is not complete: {error}")


def trace_sharded(model: nn.Module) -> None:
    """Trace the graphs of a model that TorchRec's ``DistributedModelParallel`` has just sharded."""
    trace = ConversionTrace.begin(unwrap(model))
    if trace is not None:
        trace.result(model)


def _error_text(error: BaseException) -> str:
    """What was raised, and where. Messages that may quote ids are left out."""
    parts = []
    current: BaseException | None = error
    while current is not None:
        message = without_quotes(str(current)) if isinstance(current, ConversionError) else _LEFT_OUT
        frames = "".join(traceback.format_list(traceback.extract_tb(current.__traceback__)))
        parts.append(f"{type(current).__name__}: {message}\n{frames}")
        current = current.__cause__
    return "\ncaused by:\n".join(parts)


def without_quotes(value: Any) -> Any:
    """A report, or part of one, without ids: what the model's own code has said about a batch may quote them.

    So may a range that is proved by the values of a tensor of the model.
    """
    if isinstance(value, str):
        text = _SAID.sub(rf"raises \1 {_LEFT_OUT}", value)
        return _READ_FROM_A_TABLE.sub(r"\1 in a range (left out here: its borders are ids)", text)
    if isinstance(value, tuple):
        return tuple(without_quotes(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        changed = {name: new for name, old in fields.items() if (new := without_quotes(old)) != old}
        return dataclasses.replace(value, **changed) if changed else value
    return value


def _list_all(top: Path) -> None:
    """Write the page that lists all folders. Several processes may do so at the same time."""
    page, listed = top / "index.html", None
    if page.exists() and not (page.is_file() and is_index_of_all(_beginning(page))):
        _warn(f"{page} is not a page of {VARIABLE}, so it stays as it is, and the conversions are not listed there")
        return
    # Again, if others came meanwhile: whoever writes last has then seen all.
    while listed != (folders := _finished(top)):
        write_text(page, index_of_all(folders))
        listed = folders


def _beginning(page: Path) -> str:
    with page.open(encoding="utf-8", errors="replace") as file:
        return file.read(1000)


def _finished(top: Path) -> list[str]:
    """The folders of conversions that have ended, in order."""
    folders = [path.name for path in top.iterdir() if _FOLDER.match(path.name) and (path / "index.html").is_file()]
    return sorted(folders, key=lambda name: (int(name.partition("-")[0]), name))


def _new_folder(directory: Path, name: str) -> Path:
    number = 1
    while True:
        folder = directory / f"{number:03d}-{name}"
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
            continue
        return folder


def _name_of(model: object) -> str:
    inner = unwrap(model) if isinstance(model, nn.Module) else model
    name = re.sub(r"\W", "_", type(inner).__name__)[:80]
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return f"{name}-rank-{dist.get_rank()}" if several else name


def _whole_graphs(model: nn.Module) -> dict[str, str]:
    inner = unwrap(model)
    if not isinstance(inner, WholeGraph):
        return {}
    graphs = {"train_graph.txt": inner.train_graph, "eval_graph.txt": inner.eval_graph}
    return {name: format_graph(graph, with_meta=True) + "\n" for name, graph in graphs.items()}


def _versions() -> Mapping[str, object]:
    several = dist.is_available() and dist.is_initialized()
    return {
        "recfx": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "rank": dist.get_rank() if several else 0,
        "world_size": dist.get_world_size() if several else 1,
    }


def _warn(message: str) -> None:
    warnings.warn(f"recfx: {message}.", TraceWarning, stacklevel=2)
