"""The registry of what files consist of: which module serves each node, by the kind of program that a file holds."""

from dataclasses import dataclass, replace

from recfx.errors import Diagnostic
from recfx.exporter.serving.aten import AtenFindRows, AtenPoolRows, AtenSelectBags
from recfx.exporter.serving.find_rows import FindFrozenRows
from recfx.exporter.serving.pool_rows import FindAndPool, PoolRows
from recfx.exporter.serving.select_bags import SelectBags
from recfx.exporter.serving.traced import TracedFindRows, TracedSelectBags
from recfx.exporter.serving.triton import DEVICE_TYPES, TritonPoolRows
from recfx.ir.context import LookupFacts, Served


@dataclass(frozen=True)
class ServingTarget:
    """The modules of one kind of program; what is not named here is the same in all of them.

    To passes it is what the kernel targets of a machine are for models: it has the methods of ``Targets``.

    Args:
        name: the name of the target.
        format: the format of its files, as for ``export``.
        is_portable: whether its files use only operators of torch and FBGEMM.
        device_types: the kinds of devices that its files are made for; () for any, the CPU included.
        select: serves ``select_features``.
        find: serves ``find_rows``.
        pools: serve ``lookup``: the first that does not decline, and the last never does.
        fused: serves ``find_rows`` and ``lookup`` together, if anything does.
        counts_probes: whether it has to know the longest probe of each index.
    """

    name: str
    format: str = "torchscript"
    is_portable: bool = True
    device_types: tuple[str, ...] = ("cpu",)
    select: type[SelectBags] = SelectBags
    find: type[FindFrozenRows] = FindFrozenRows
    pools: tuple[type[PoolRows], ...] = (PoolRows,)
    fused: type[FindAndPool] | None = None
    counts_probes: bool = False

    def serve(self, lookup: LookupFacts, collection: str) -> Served:
        if self.fused is not None:
            return Served(self.fused.kernel)
        declined: list[Diagnostic] = []
        for pool in self.pools:
            refusal = pool.declines(lookup)
            if refusal is None:
                break
            declined.append(refusal)
        message = f"files of target {self.name!r} have no operator that finds ids and pools their rows."
        return Served(pool.kernel, tuple(declined), Diagnostic("no_finding_kernel", "", message, by=self.name))

    def may_name(self, backend: str) -> bool:
        return backend in {module.kernel for module in (self.pools if self.fused is None else (self.fused,))}

    def pool(self, kernel: str) -> type[PoolRows]:
        """What serves a ``lookup`` with this kernel."""
        return {pool.kernel: pool for pool in self.pools}[kernel]

    def find_rows(self, device: str) -> Served:
        return Served(self.name)

    def index_operators(self, device: str) -> str:
        return ""  # nothing is inserted into an index of a file


SCRIPT = ServingTarget("torchscript")
"""TorchScript on the CPU, with FBGEMM's operators."""

TRACED = ServingTarget("pt2", "pt2", select=TracedSelectBags, find=TracedFindRows)
"""``torch.export`` on the CPU, with FBGEMM's operators."""

NATIVE = ServingTarget("torchscript with recfx's operators", is_portable=False, fused=FindAndPool)
"""TorchScript on the CPU, with recfx's C++ operators."""

ATEN = ServingTarget(
    "aten", device_types=(), select=AtenSelectBags, find=AtenFindRows, pools=(AtenPoolRows,), counts_probes=True
)
"""TorchScript on any device, without FBGEMM's operators."""

TRITON = replace(
    ATEN,
    name="aten with recfx's kernels",
    is_portable=False,
    device_types=DEVICE_TYPES,
    pools=(TritonPoolRows, AtenPoolRows),
)
"""``ATEN``, but where recfx has a kernel in Triton for a lookup, its operator, which Python registers."""

FOR_DEVICES = (ATEN, TRITON)
"""The targets whose files run on any device."""


def target_of(format: str, portable: bool, device_type: str) -> ServingTarget | None:
    """The target of the files that ``export`` is asked for; None if there are no such files."""
    for target in (SCRIPT, TRACED, NATIVE, *FOR_DEVICES):
        is_for_device = device_type in target.device_types or (not target.device_types and device_type != "cpu")
        if (target.format, target.is_portable) == (format, portable) and is_for_device:
            return target
    return None
