"""Pictures of models in notebooks."""

from __future__ import annotations

import tempfile
from pathlib import Path

from torch import nn

import recfx


class Picture:
    """What ``recfx.draw`` draws of a model, where a notebook shows it; Graphviz has to be installed."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def _repr_svg_(self) -> str:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.svg"
            recfx.draw(self.model, path)
            return path.read_text(encoding="utf-8")
