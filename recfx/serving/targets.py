"""The registry of exported nodes: which module serves each node, by the kind of program that a file holds."""

from dataclasses import dataclass

from recfx.serving.aten import AtenFindRows, AtenPoolRows, AtenSelectBags
from recfx.serving.find_and_pool import FindAndPool
from recfx.serving.find_rows import FindFrozenRows
from recfx.serving.pool_rows import PoolRows
from recfx.serving.select_bags import SelectBags
from recfx.serving.traced import TracedFindRows, TracedSelectBags


@dataclass(frozen=True)
class ServingTarget:
    """The modules of one kind of program; what is not named here is the same in all of them.

    Args:
        name: of the target.
        select: serves ``select_features``.
        find: serves ``find_rows``.
        pool: serves ``lookup``.
        fused: serves ``find_rows`` and ``lookup`` together, if anything does.
        counts_probes: whether it has to know the longest probe of each index.
    """

    name: str
    select: type[SelectBags] = SelectBags
    find: type[FindFrozenRows] = FindFrozenRows
    pool: type[PoolRows] = PoolRows
    fused: type[FindAndPool] | None = None
    counts_probes: bool = False

    @property
    def is_portable(self) -> bool:
        """Whether it needs only the operators of torch and FBGEMM."""
        return self.fused is None


SCRIPT = ServingTarget("torchscript")
"""TorchScript on the CPU, with FBGEMM's operators."""

TRACED = ServingTarget("pt2", TracedSelectBags, TracedFindRows)
"""``torch.export`` on the CPU, with FBGEMM's operators."""

NATIVE = ServingTarget("torchscript with recfx's operators", fused=FindAndPool)
"""TorchScript on the CPU, with recfx's C++ operators."""

ATEN = ServingTarget("aten", AtenSelectBags, AtenFindRows, AtenPoolRows, counts_probes=True)
"""TorchScript on any device, without FBGEMM's operators."""
