"""How kernels are cut to fit a chip: the size of a grid, the width of a block, and what fits into the unified buffer.

Every limit of a chip stands here once, with its reason. Another chip is one more entry of ``CHIPS``; another kernel is
one more entry of ``NEEDS``. ``tests/ascend`` compares both with what Ascend's compiler says.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Chip:
    """The limits of one chip."""

    name: str  # as the driver and Ascend's compiler call it
    # A grid of so many programs keeps every core busy; each program loops over its share of the work, because starting
    # a program costs more than a turn of a loop
    vector_cores: int
    ub_bytes: int  # the unified buffer of one vector core. All vectors of a program lie in it; nothing spills out of it
    # Whether it is of the generation after the 910, which has a compiler of its own (``dav-c310``)
    is_950: bool = False
    # Every vector in the unified buffer begins at a multiple of this, as the compiler writes into every module that it
    # compiles
    ub_alignment_bytes: int = 32
    most_programs: int = 65_535  # of one launch, the product of the grid's axes; triton-ascend refuses more


def _chip(name: str, vector_cores: int, is_950: bool = False) -> Chip:
    """The chips of a generation differ in the number of their cores only. That of the 910 has the 910B and 910_93; the
    next one was called 910_95 first, and of its 256 KiB of unified buffer, the compiler keeps 8.
    """
    return Chip(name, vector_cores, (248 if is_950 else 192) * 1024, is_950)


ASCEND_910B = _chip("Ascend910B3", 40)
"""What kernels are compiled for where nobody names a chip: 20 AI cores with two vector cores each."""

# Vector cores, twice the AI cores, by the ends of names, as the driver and `NPUTargetSpec.td` of Ascend's open compiler
# have them. CANN has the same numbers as `vector_core_cnt` in `data/platform_config/<name>.ini`.
_910B = {"B1": 48, "B2": 48, "B2C": 48, "B4": 40, "B4-1": 40}
_910_93 = {"9362": 40, "9372": 40, "9381": 48, "9382": 48, "9391": 48, "9392": 48}
_910_95 = {"950z": 8, **dict.fromkeys(("9579", "957b", "957d"), 56)}
_910_95 |= {**dict.fromkeys(("9581", "9589", "958a", "958b"), 64), "9599": 72}
_950PR = {"950z": 8, **dict.fromkeys(("9579", "957a", "957b", "957c", "957d"), 56)}
_950PR |= {**dict.fromkeys(("9589", "958a", "958b", "958c", "958d"), 64), **dict.fromkeys(("9599", "959a", "959b"), 72)}
_950DT = {"950x": 16, "950y": 16, **{str(number): 56 for number in range(9571, 9579)}}
_950DT |= {str(number): 64 for number in range(9581, 9589)}
_950DT |= dict.fromkeys(("9591", "9592", "9595", "9596", "95A1", "95A2"), 72)

CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        chip.name: chip
        for chip in (
            ASCEND_910B,
            *(_chip(f"Ascend910{end}", cores) for end, cores in _910B.items()),
            *(_chip(f"Ascend910_{end}", cores) for end, cores in _910_93.items()),
            *(_chip(f"Ascend910_{end}", cores, is_950=True) for end, cores in _910_95.items()),
            *(_chip(f"Ascend950PR_{end}", cores, is_950=True) for end, cores in _950PR.items()),
            *(_chip(f"Ascend950DT_{end}", cores, is_950=True) for end, cores in _950DT.items()),
        )
    }
)
"""By name. What kernels need of the unified buffer was measured for the 910 generation."""


@dataclass(frozen=True)
class OnGPU:
    """How a kernel is launched on a GPU, if nothing else was measured there. ``kernels/README.md`` has what was.

    Args:
        programs: for each multiprocessor.
        columns_per_warp: a program has a warp for so many columns of its block, at most four; 0: it always has four.
    """

    programs: int = 32
    columns_per_warp: int = 0

    def warps(self, block: int) -> int:
        """For a block of so many columns: a power of two."""
        return max(1, min(4, block // self.columns_per_warp)) if self.columns_per_warp else 4


# A row of one vector: a warp loads it with as few instructions as four, and sums over columns stay inside the warp.
_STEP_ON_GPU = OnGPU(128, 256)
_ONE_WARP = OnGPU(columns_per_warp=1 << 20)  # a lane has one bag or id
ON_GPU: Mapping[str, OnGPU] = MappingProxyType(
    {
        "recfx_quantized_lookup": OnGPU(64, 256),  # whose rows are not whole words
        **dict.fromkeys(("recfx_pooled_lookup_on_gpu", "recfx_gather_rows_on_gpu"), OnGPU(columns_per_warp=128)),
        "recfx_per_sample_weight_gradients_on_gpu": OnGPU(columns_per_warp=128),
        "recfx_quantized_lookup_on_gpu": OnGPU(columns_per_warp=256),
        **dict.fromkeys(("recfx_fused_step", "recfx_fused_step_of_borders"), _STEP_ON_GPU),
        **dict.fromkeys(("recfx_find_rows_on_gpu", "recfx_step_digits_on_gpu"), _ONE_WARP),
        **dict.fromkeys(("recfx_bucket_counts_on_gpu", "recfx_bucket_scatter_on_gpu"), _ONE_WARP),
        # These have no form for GPUs: they read vectors of bags and ids as well there. One program, or each, reads
        # something of every key in turn: there are no more programs than run at once.
        **{"recfx_bag_offsets": OnGPU(4), "recfx_select_keys": OnGPU(16)},
    }
)
"""By kernel; others are launched as ``OnGPU()`` says."""


def bags_on_gpu(block: int, element_bytes: int) -> int:
    """Bags, or ids, of a tile: as many as a warp has columns for, 128 of 4 bytes, or 256 that are smaller."""
    return max(1, min(16, (128 if element_bytes == 4 else 256) // block))


SMALLEST_BLOCK = 16
"""Columns. 16 halves fill 32 bytes, the alignment of the unified buffer. Narrower blocks would be further forms to
compile and to keep, for less than one percent of the buffer."""


LOOKUP_ROWS = (8, 16, 32)
"""For so many rows a pooled lookup can ask at a time."""


@dataclass(frozen=True)
class Need:
    """An upper bound of the unified buffer that a kernel takes."""

    # Bytes that do not depend on the block: scalars on their way to memory, and the padding of small vectors
    fixed: int
    # Bytes per column of the block. Every vector that is alive at once has its part, and vectors that are read or
    # written in a loop have it twice: the compiler loads the next while it computes on the last
    per_column: int
    per_row: int = 0  # of a fused step, bytes per column and position of a block (``step_rows``)
    # A fused step needs so many bytes per column for each place that it writes through pointers of its own, up to
    # four; and as many for the gradients that it asks for at a time, where a row crosses a border of chunks.
    per_place: int = 0
    per_lookup_row: int = 0  # of a pooled lookup, bytes per column and position of a block (``lookup_rows``)

    def of(self, block: int) -> int:
        rows = step_rows(block) if self.per_row else 0
        of_rows = self.per_row * rows + self.per_place * min(rows, 4)
        of_rows += self.per_lookup_row * lookup_rows(block, ASCEND_910B) if self.per_lookup_row else 0
        return self.fixed + (self.per_column + of_rows) * block


def _floats(need: Need) -> dict[int, Need]:
    """Rows of float32, float16 and bfloat16 need the same: kernels compute in float32 whatever they read."""
    return {4: need, 2: need}


@dataclass(frozen=True)
class RuleNeeds:
    """What the kernels of a fused step need with one rule; rules keep theirs in their own files."""

    rule: str  # its name
    step: Need  # of ``recfx_fused_step``
    step_of_borders: Need  # of ``recfx_fused_step_of_borders``

    def of(self, kernel: str) -> Need | None:
        return {"recfx_fused_step": self.step, "recfx_fused_step_of_borders": self.step_of_borders}.get(kernel)


NEEDS: Mapping[str, Mapping[int, Need]] = MappingProxyType(
    {
        # The rows of a block, twice, and sums in float32.
        "recfx_pooled_lookup": {4: Need(2176, 56, per_lookup_row=8), 2: Need(64, 56, per_lookup_row=4)},
        # Eight rows, twice; halves also as float32.
        "recfx_gather_rows": {4: Need(512, 64), 2: Need(512, 96)},
        # Scales and biases, and 32 bytes of each row, however narrow; the rows of a block as bytes and in float32.
        "recfx_quantized_lookup": {1: Need(48_000, 48, per_lookup_row=12)},
        # Eight rows, twice, and the gradient of a bag.
        "recfx_per_sample_weight_gradients": {4: Need(800, 78), 2: Need(320, 46)},
        # Ids are scalars: no block.
        "recfx_find_rows": {8: Need(128, 0)},
        "recfx_bucket_scatter": _floats(Need(64, 0)),
        # Always 128 columns at once.
        "recfx_initialize_rows": _floats(Need(45_568, 0)),
        # Always 512 bags or ids at once.
        "recfx_bag_offsets": {8: Need(89_216, 0), 4: Need(76_928, 0)},
        # Always 1,024 bags or ids at once.
        "recfx_select_keys": {4: Need(61_472, 0), 2: Need(49_184, 0)},
        # Always 1,024 positions at once.
        "recfx_step_digits": {8: Need(36_864, 0)},
        # The block is the number of pieces.
        "recfx_bucket_counts": {8: Need(288, 24)},
    }
)
"""By kernel, then by the bytes of one element of its tables. What steps need depends on the rule: see ``RuleNeeds``.

The bounds hold for every compiled form (weighted or not, sum or mean, and so on) and both versions of the compiler; the
measurements are in ``tests/ascend/bounds.txt``.
"""


def chip_named(name: str) -> Chip:
    """The limits of a chip.

    Raises:
        ValueError: no chip of this name is known; the message lists those that are.
    """
    if name.startswith("Ascend310P"):  # cube and vector unit are one core, without bfloat16
        raise ValueError(f"Ascend's compilers for Triton have no target for chip {name!r}")
    if name not in CHIPS:
        raise ValueError(
            f"no tiling table for chip {name!r}, as there is for Ascend910B3 and {len(CHIPS) - 1} others; to add one, "
            "write into CHIPS of recfx/kernels/build/tiling.py what CANN's file "
            f"data/platform_config/{name}.ini says: its vector_core_cnt, and its ub_size in KiB"
        )
    return CHIPS[name]


def block_of(dim: int) -> int:
    """The columns that a kernel handles at once: a power of two, at least the dim.

    A power of two because Triton takes no other length of a vector, except on Ascend.

    Raises:
        ValueError: the dim is not positive.
    """
    if dim < 1:
        raise ValueError(f"a row has at least one column, not {dim}")
    return max(SMALLEST_BLOCK, 1 << (dim - 1).bit_length())


def lookup_rows(block: int, chip: Chip | None = None, most: int | None = None) -> int:
    """Positions for whose rows a pooled lookup asks at a time: ``most``, or fewer where as many floats fill 32 KiB.

    Args:
        block: the columns of a row, as ``block_of`` gives them.
        chip: where the kernel runs; None: not on an NPU.
        most: one of ``LOOKUP_ROWS``, if it was measured; 32 otherwise. A GPU keeps rows in registers: there, it is 8.
    """
    return max(8, min(most or (8 if chip is None else 32), 8192 // block))


def step_rows(block: int, chip: Chip | None = None) -> int:
    """Positions for which a fused step asks at a time: eight, or fewer where two vectors for each fill 16 KiB.

    The compiler for the 950 generation fails where a vector is chosen out of several: there, two are the most.

    Args:
        block: the columns of a row, as ``block_of`` gives them.
        chip: where the kernel runs; None: not on an NPU.
    """
    most = 2 if chip is not None and chip.is_950 else 8
    return max(2, min(most, 2048 // block))


def programs(chip: Chip, work: int, per_core: int = 1) -> int:
    """The size of the grid: one program per vector core, fewer if there is less work, and one if there is none.

    Args:
        chip: where the kernel runs.
        work: how many parts the work can be cut into (bags, positions, ids).
        per_core: how many programs share a core, if it was measured that several are faster.
    """
    return max(1, min(work, chip.vector_cores * per_core, chip.most_programs))


def ub_bytes(kernel: str, block: int, element_bytes: int, rule: RuleNeeds | None = None) -> int:
    """An upper bound of the unified buffer that a compiled kernel takes.

    Args:
        kernel: the name of the Triton function.
        block: its columns, as ``block_of`` gives them; of no effect on a kernel of scalars.
        element_bytes: of one element of the tables: 4 for float32, 2 for float16 and bfloat16, 1 for codes of 8 or 4
            bits; where there is no table, of one id: 8.
        rule: what the optimizer's rule needs, for a kernel that has one.

    Raises:
        ValueError: nothing is known of this kernel, or of this kernel with such elements.
    """
    of_rule = None if rule is None else rule.of(kernel)
    of_kernel = NEEDS.get(kernel) if rule is None else None if of_rule is None else _floats(of_rule)
    if of_kernel is None:
        raise ValueError(f"the unified buffer that {_named(kernel, rule)} needs was never measured")
    if element_bytes not in of_kernel:
        served = " or ".join(str(size) for size in sorted(of_kernel))
        raise ValueError(f"{kernel} serves elements of {served} bytes, not of {element_bytes}")
    return of_kernel[element_bytes].of(block)


def _named(kernel: str, rule: RuleNeeds | None) -> str:
    return kernel if rule is None else f"{kernel} with rule {rule.rule}"


def refusal(chip: Chip, kernel: str, block: int, element_bytes: int, rule: RuleNeeds | None = None) -> str | None:
    """Why a kernel does not serve a block on a chip; None if it does.

    The bound includes loading ahead. Without it, some blocks that are refused would just fit; but such a kernel fills
    the whole buffer, and one version of the compiler does not always find the same plan. The other arguments, and what
    is raised, are those of ``ub_bytes``.
    """
    needed = ub_bytes(kernel, block, element_bytes, rule)
    if needed <= chip.ub_bytes:
        return None
    return (
        f"{_named(kernel, rule)} needs {needed:,} bytes of the unified buffer for rows of {block:,} columns, "
        f"{chip.name} has {chip.ub_bytes:,}."
    )
