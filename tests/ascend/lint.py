"""Constructs that Ascend's tool chain takes without a word and gets wrong, or serialises, found in a kernel's text.

Each was seen with triton-ascend 3.2.0 and ascendnpu-ir 1.0.0 and 1.2.0.
"""

import re
from collections.abc import Iterator

from tests.ascend.lower import Lowered

_IN_TTIR = {
    "unsigned_vector": (
        r"arith\.(?:shrui|remui|divui)\b[^\n]*: tensor<",
        "unsigned shifts and divisions of vectors become signed ones: use signed integers, and mask.",
    ),
    "multiply_high": (r"tt\.mulhiui\b", "`umulhi` is lowered to the signed product: do without it."),
    "compare_and_swap": (r"tt\.atomic_cas\b", "`atomic_cas` gives back the new value: give each slot one owner."),
    "double": (r"\bf64\b", "BiSheng's compiler has no double precision."),
    "boolean_in_while": (
        r"scf\.while [^\n]*: \([^)\n]*\bi1\b",
        "loops that carry a boolean make one version of the compiler crash, or never end, now and then: carry numbers.",
    ),
}
_WIDE_VECTOR = re.compile(r"arith\.(?:addi|subi|muli|cmpi|shli|shrsi|divsi|remsi|maxsi|minsi)\b[^\n]*: tensor<\d+xi64>")
_SELECTED = re.compile(r"(%[\w#]+) = arith\.select [^\n]*: tensor<\d+xi1>, tensor<")
_STORED = re.compile(r"bufferization\.materialize_in_destination (%[\w#]+) in writable")


def lint(lowered: Lowered) -> Iterator[tuple[str, str]]:
    """What is wrong with a kernel: a code and a sentence each.

    ``discrete_store``: a mask that is no prefix makes a store write the whole block, so that programs which share a
    block lose each other's values. ``wide_vector``: vectors of int64 are computed element by element.
    """
    for code, (pattern, sentence) in _IN_TTIR.items():
        if re.search(pattern, lowered.ttir):
            yield code, sentence
    if _WIDE_VECTOR.search(lowered.linalg):
        yield "wide_vector", "arithmetic on vectors of int64 becomes a loop over their elements: compute with scalars."
    if set(_SELECTED.findall(lowered.linalg)) & set(_STORED.findall(lowered.linalg)):
        yield "discrete_store", "a store's mask is no prefix: the whole block is read, changed and written back."
