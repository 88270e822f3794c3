"""What the user asks ``convert`` for, and what is wrong with it whatever the model holds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from recfx.collections.sharding.plan import MOST_RANKS, check_plan
from recfx.errors import ConversionError, type_of
from recfx.errors.argument_types import HOW
from recfx.hashing import HashConfig, as_integer
from recfx.ir.tables import IdRange
from recfx.models.replace_collections import Asked, Hashing, check_asked
from recfx.models.sample import Sample
from recfx.passes import Pass
from recfx.planner.pricing.node_facts import whole_number
from recfx.planner.topology import check_topology

DEFAULT_HASHING = HashConfig()
"""The default of ``hashing=``, told apart by identity: an equal config from the user counts as a request."""


@dataclass(frozen=True)
class Request:
    """The arguments of ``convert``, which explains them."""

    call: Sample | None = None
    hashing: Hashing = DEFAULT_HASHING
    plan: ShardingPlan | None = None
    env: ShardingEnv | None = None
    device: torch.device | str | None = None
    backend: str = "auto"
    whole_graph: bool = False
    verify: bool | None = None
    inplace: bool = False
    on_unsupported: Literal["error", "keep"] = "error"
    id_ranges: Mapping[str, tuple[int, int]] | None = None
    passes: tuple[Pass, ...] | None = None
    managed_collisions: Literal["keep", "convert"] = "keep"
    dedup: Asked = "auto"
    topology: Topology | None = None  # of a dry run: ranks that need not be there

    @property
    def keeps(self) -> bool:
        """Whether collections that cannot be converted stay as they are."""
        return self.on_unsupported == "keep"

    @property
    def shards(self) -> bool:
        return self.plan is not None or self.env is not None or self.topology is not None

    @property
    def verifies(self) -> bool:
        """Whether the result is compared with the original, unless it is too large."""
        return self.call is not None if self.verify is None else self.verify

    def check(self, model: Any) -> None:
        """Refuse arguments that are none, and a ``model`` that is no module."""
        if self.on_unsupported not in ("error", "keep"):
            raise _invalid(f"on_unsupported is {self.on_unsupported!r}.", "use 'error' or 'keep'.")
        if self.managed_collisions not in ("keep", "convert"):
            raise _invalid(f"managed_collisions is {self.managed_collisions!r}.", "use 'keep' or 'convert'.")
        check_asked(self.dedup)
        if self.plan is not None:
            check_plan(self.plan)
        if self.topology is not None:
            check_topology(self.topology)
        if self.env is not None:
            world_size = whole_number(self.env.world_size, "env.world_size", most=MOST_RANKS)
            whole_number(self.env.rank, "env.rank", least=0, most=world_size - 1)
        for argument, needs_sample in (("verify", self.verify), ("whole_graph", self.whole_graph)):
            if needs_sample and self.call is None:
                raise ConversionError(
                    f"{argument}=True needs a sample.",
                    reason="sample_required",
                    what_to_do="pass sample=(inputs, ...), one call of the model.",
                )


def named_passes(given: Any) -> tuple[Pass, ...] | None:
    """The passes that a user names, in order; None if there are none named."""
    if given is None:
        return None
    passes = tuple(given)
    for one in passes:
        has_call = not isinstance(one, type) and callable(getattr(one, "call", None))
        if not has_call or not isinstance(getattr(one, "name", None), str):
            raise _invalid(f"passes has {type_of(one)}.", HOW["passes"])
    return passes


def declared_ranges(declared: Any) -> dict[str, IdRange]:
    """The ``id_ranges`` of ``convert``, by feature."""
    ranges = {}
    for feature, given in declared.items():
        bounds: list[Any] = [as_integer(bound) for bound in given] if isinstance(given, (tuple, list)) else []
        if not isinstance(feature, str) or len(bounds) != 2 or None in bounds or bounds[0] > bounds[1]:
            raise _invalid(f"id_ranges has {feature!r}: {given!r}.", HOW["id_ranges"])
        ranges[feature] = IdRange(*bounds)
    return ranges


def _invalid(message: str, what_to_do: str) -> ConversionError:
    return ConversionError(message, reason="invalid_argument", what_to_do=what_to_do)
