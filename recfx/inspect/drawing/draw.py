"""``recfx.draw``: a picture of a model's graphs, before and after conversion, as a file."""

import base64
import functools
import gzip
import json
import os
import re
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ShardingPlan

from recfx.errors import ConversionError, DrawingError, printable
from recfx.errors.argument_types import typed
from recfx.inspect.cost import checked_topology
from recfx.inspect.drawing.collect import collect
from recfx.kernels.build.private_files import new_file
from recfx.planner.pricing.hardware import Hardware, HardwareName


def write_text(path: Path, text: str) -> None:
    """Write a file, replacing one that exists in one step; a symbolic link stays."""
    place, why = Path(os.path.realpath(path)), ""
    try:
        if not path.parent.is_dir():
            why = f"there is no directory {path.parent}"
        elif place.exists() and not place.is_file():
            why = "it is not a regular file"
        else:
            with new_file(place) as file:
                file.path.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
                file.put_in_place()
    except OSError as error:
        why = error.strerror or str(error)
    if why:
        raise DrawingError(
            f"{path} cannot be written: {why}. A file that was there before is as it was.",
            reason="cannot_write",
            what_to_do="pass the path of a file in a directory that exists, with room for it, where you may write.",
        )


class Picture:
    """A picture that is in no file; a notebook shows its ``page``."""

    def __init__(self, page: str) -> None:
        self.page = page

    def __repr__(self) -> str:
        return "Picture(shown by notebooks; give recfx.draw a path for a file)"

    def _repr_html_(self) -> str:
        """What a notebook shows: a frame, so that the page and the notebook do not change each other."""
        style = "width: 100%; height: 45em; border: 1px solid"
        return f'<iframe title="Picture of the model" style="{style}" srcdoc="{escape(self.page)}"></iframe>'


@typed(ConversionError)
def draw(
    model_or_graph: nn.Module,
    path: str | os.PathLike[str] | None = None,
    topology: Topology | Hardware | HardwareName | None = None,
    *,
    plan: ShardingPlan | None = None,
    world_size: int | None = None,
    sample: Any = None,
) -> Path | Picture:
    """Draw a model's graphs, before and after conversion, into a file, or where a notebook shows them.

    The model does not change, nothing runs and nothing is communicated.

    Example:
        >>> from recfx.planner.topology import npu_topology
        >>> recfx.draw(Model(), "model.html")
        PosixPath('model.html')
        >>> file = recfx.draw(Model(), "planned.html", npu_topology(8))  # as recfx.plan would shard it over 8 NPUs

    Args:
        model_or_graph: a model, converted or not, also inside DDP and torch.compile wrappers; or a graph that
            ``recfx.trace`` returns, or one of ``convert(..., whole_graph=True)``, with the code around the collections.
            Of any other model, each collection is drawn by itself. Each rank of a sharded model draws its own graphs.
        path: the ``.html`` file, which is replaced if it exists: one page that needs no network, with every pass, what
            is known of each node, and a search. Default: no file.
        topology: as for ``recfx.cost``: what times are predicted for. A model that is not sharded is drawn as rank 0
            would have it if ``recfx.plan`` sharded it over the ranks of this topology, which need not be there: nodes
            and kernels are those of its devices, as if all that kernels need were installed.
        plan, world_size: as for ``recfx.cost``: draws the model as this plan shards it.
        sample: as for ``recfx.cost``: the batch and the lengths that a page starts from.

    Returns:
        the path of the file; without one, an object that a notebook shows as the page.

    Raises:
        DrawingError: ``invalid_argument``, ``unknown_ending``, ``no_collection``, ``cannot_write``; with a plan or a
            topology also ``already_sharded``. A file that was there before is as it was.
        ConversionError: ``invalid_argument``: it is not a module; with a plan or a topology, ``invalid_topology`` and
            those of ``recfx.plan`` and of sharding.
        InputError: ``invalid_argument``: ``world_size`` is no number of ranks.
    """
    name = os.fspath(path) if isinstance(path, os.PathLike) else path
    if name is not None and (not isinstance(name, str) or not name or "\0" in name):
        raise DrawingError(
            f"path is {path!r}, which cannot be the name of a file.",
            reason="invalid_argument",
            what_to_do="pass the path of the file, as a str or a pathlib.Path.",
        )
    target = None if name is None else Path(name)
    if target is not None and target.suffix.lower() != ".html":
        raise DrawingError(
            f"{target} does not end in .html, and recfx.draw writes one HTML page.",
            reason="unknown_ending",
            what_to_do="end the path in .html; the page can be printed, and its picture saved, from any browser.",
        )
    drawing = collect(model_or_graph, checked_topology(topology), plan, world_size, sample)
    text = render_html(drawing)
    if target is None:
        return Picture(text)
    write_text(target, text)
    return target


def render_html(drawing: dict[str, Any]) -> str:
    """The whole page of what ``collect`` returns: data, which the page's script shows as text."""
    parts = {
        "TITLE": escape(printable(drawing["title"])),
        "SUBTITLE": escape(printable(drawing["subtitle"])),
        "DATA": _packed(drawing),
    }
    # One pass over the template, whose other marks name files: nothing that was filled in is looked at again.
    return re.sub(r"<!--([\w.-]+)-->", lambda mark: parts.get(mark[1]) or _asset(mark[1]), _asset("page.html"))


@functools.cache
def _asset(name: str) -> str:
    """A file that pages are made of: their own, or Graphviz compiled to WebAssembly (see ``assets/licenses``)."""
    return files(__package__).joinpath("assets", name).read_bytes().decode()


def _packed(data: Any) -> str:
    """Compressed JSON as letters and digits, which may stand inside a script element whatever names the model has."""
    text = json.dumps(_readable(data), ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _readable(data: Any) -> Any:
    """Replace what cannot be read in each text: Graphviz ends a label at a zero byte, for example."""
    if isinstance(data, str):
        return printable(data)
    if isinstance(data, dict):
        return {name: _readable(value) for name, value in data.items()}
    return [_readable(item) for item in data] if isinstance(data, (list, tuple)) else data
