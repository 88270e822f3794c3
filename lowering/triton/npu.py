"""Target ``npu``: recfx's kernels in Triton on Ascend NPUs, where the vendor's operators do not go first.

Both forms give the same results. ``python -m recfx doctor`` times them, and keeps which is faster. Where nobody has,
the vendor's run: nobody has timed ours on an NPU, and the one published time of another kernel in Triton that copies
rows there is some hundred times that of torch_npu's operator.
"""

from recfx.errors import Diagnostic
from recfx.ir.context import LookupFacts
from recfx.kernels.build import tuned
from recfx.lowering.triton import target, vendor

build, is_here = target.build, target.is_here


def serves(lookup: LookupFacts, chip: str | None) -> Diagnostic | None:
    """None if the kernels serve the lookup, and the vendor's operators do not, or were measured to be slower."""
    refusal = target.serves(lookup, chip)
    if refusal is not None or vendor.unserved(lookup) is not None:
        return refusal
    is_vendor_faster = measured(lookup, chip)
    if is_vendor_faster is None:
        advice = "python -m recfx doctor measures, and keeps what is faster."
        message = "nobody has timed its kernels in Triton on this chip, so the vendor's operators run."
        return Diagnostic("not_measured", "", message, advice)
    message = "python -m recfx doctor has measured that the vendor's operators are faster on this chip."
    return Diagnostic("slower", "", message) if is_vendor_faster else None


def measured(lookup: LookupFacts, chip: str | None) -> int | None:
    """Whether the vendor's operators are faster on the NPU of this name; None if nobody has measured."""
    widest = max(table.embedding_dim for table in lookup.tables)
    kind = tuned.kind_of_lookup(lookup.combine, lookup.facts[0].dtype, widest)
    return None if chip is None else tuned.number(chip, tuned.VENDOR, kind)
