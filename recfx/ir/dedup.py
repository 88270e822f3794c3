"""Which tables send each different id of a batch once: what was asked for, what is known, and what follows from it.

It follows from the table alone, so that the passes, the bytes on the wire and the planner agree about it.
"""

from dataclasses import dataclass

from recfx.errors import Diagnostic


@dataclass(frozen=True)
class Dedup:
    """What a user says about sending the ids of one table once."""

    asked: bool | None = None  # True and False decide; None sends them once where it is expected to pay
    # the expected share of different ids among those of a key in the batch of a rank; None: not known
    share: float | None = None
    on_device: bool = False  # whether ids are exchanged on a device that has no kernel which finds different ones


WHERE_IT_PAYS = Dedup()


ID_BYTES, NUMBER_BYTES = 8, 4
MEMORY_PER_WIRE = 8
"""How many bytes of memory are read or written in the time in which one byte is sent; an assumption."""


def why_not(dedup: Dedup, table: str, dim: int, *, is_pooled: bool, is_counted: bool) -> Diagnostic | None:
    """Why a sharded table of ``dim`` columns does not send each different id once; None if it does.

    ``is_counted``: whether its index counts every sight of an id.
    """
    code, message = "", ""
    if dedup.asked is False:
        code, message = "dedup_off", f"table {table!r} is to send ids as they come: dedup=False."
    elif is_pooled:
        code, message = "dedup_pooled", f"rows of table {table!r} are pooled before they are sent back."
    elif is_counted:
        code = "dedup_counted"
        message = f"the index of table {table!r} evicts or admits ids by how often they are seen: every sight is sent."
    elif dedup.on_device:
        code = "dedup_on_device"
        message = (
            f"ids of table {table!r} are exchanged on the device, which has no kernel that finds different "
            "ones; let the host exchange them, as with recfx.sharders(host_env=...)."
        )
    elif not dedup.asked and dedup.share is None:
        code = "dedup_ratio_unknown"
        message = (
            f"the share of different ids of table {table!r} is not known: give it to convert, as in "
            f"dedup={{{table!r}: 0.3}}, or pass dedup=True and measure it."
        )
    elif not dedup.asked and dedup.share is not None and not pays(dedup.share, dim):
        code = "dedup_does_not_pay"
        message = f"{dedup.share:.0%} of the ids of table {table!r} are expected to be different: it would take longer."
    return Diagnostic(code, "", message) if code else None


def pays(share: float, dim: int) -> bool:
    """Whether fewer bytes on the wire are worth more bytes in memory, per id.

    Saved are the id, its row and the row's gradient. To find different ids reads a line of the cache, the id and its
    number; to expand rows reads and writes a row, and so does the backward.
    """
    saved = (1 - share) * (ID_BYTES + 2 * NUMBER_BYTES * dim)
    spent = 64 + 2 * ID_BYTES + 4 * NUMBER_BYTES * dim
    return MEMORY_PER_WIRE * saved > spent


def different(feature: str) -> str:
    """The name of the length that counts only the different ids of a feature, as ``L_<feature>`` counts all."""
    return f"{feature}.different"
