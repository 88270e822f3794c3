"""``DistributedModelParallel`` with the arguments that Rec SDK Torch documents for NPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchrec.distributed.model_parallel import DataParallelWrapper
from torchrec.distributed.model_parallel import DistributedModelParallel as TorchRecModelParallel
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingPlan

from recfx.collections.collection import unsharded_collections
from recfx.errors import ConversionError, type_of
from recfx.planner.sharder import HashEmbeddingBagCollectionSharder


class DistributedModelParallel(TorchRecModelParallel):  # type: ignore[misc, unused-ignore]
    """TorchRec's class, with the one way to call it on NPUs: other ways are refused before anything is sharded.

    Args:
        module: holds at least one converted collection.
        env: must be None.
        device: the device of the shards; on ``npu`` the arguments are checked.
        plan: the result of ``EmbeddingShardingPlanner(...).collective_plan(module, sharders, pg)``.
        sharders: the result of ``get_default_hybrid_sharders(host_env)``.
        init_data_parallel: must be True.
        init_parameters: must be True.
        data_parallel_wrapper: must be None.
        model_tracker_configs: must be None.
        check_arguments: True or False: always or never check. None: check only on ``npu``, because TorchRec accepts
            more on other devices.

    Raises:
        ConversionError: ``npu_argument`` for an argument that must keep its default, ``npu_plan``, ``npu_sharders``,
            ``no_collection``.
    """

    def __init__(
        self,
        module: nn.Module,
        env: ShardingEnv | None = None,
        device: torch.device | None = None,
        plan: ShardingPlan | None = None,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        data_parallel_wrapper: DataParallelWrapper | None = None,
        model_tracker_configs: Any = None,
        *,
        check_arguments: bool | None = None,
    ) -> None:
        on_npu = device is not None and torch.device(device).type == "npu"
        if on_npu if check_arguments is None else check_arguments:
            for name, value, default in (
                ("env", env, None),
                ("init_data_parallel", init_data_parallel, True),
                ("init_parameters", init_parameters, True),
                ("data_parallel_wrapper", data_parallel_wrapper, None),
                ("model_tracker_configs", model_tracker_configs, None),
            ):
                if value is not default:
                    message = f"{name} is {value!r}; on NPUs it must be {default!r}."
                    raise ConversionError(message, reason="npu_argument", what_to_do=f"leave {name} out.")
            ours = [
                sharder
                for sharder in sharders or ()
                if isinstance(sharder, HashEmbeddingBagCollectionSharder) and sharder.stock is None
            ]
            if not ours or any(sharder.host_group is None for sharder in ours):
                raise ConversionError(
                    "sharders are not those of get_default_hybrid_sharders, which send ids between hosts.",
                    reason="npu_sharders",
                    what_to_do="pass sharders=get_default_hybrid_sharders(host_env=host_env).",
                )
            _check_plan(plan, module)
        trackers = [] if model_tracker_configs is None else [model_tracker_configs]  # TorchRec 1.2 has none
        super().__init__(
            module, env, device, plan, sharders, init_data_parallel, init_parameters, data_parallel_wrapper, *trackers
        )


def _check_plan(plan: ShardingPlan | None, module: nn.Module) -> None:
    """Check that the plan is for this model; where it came from cannot be checked."""
    collections = unsharded_collections(module)
    if isinstance(plan, ShardingPlan) and not collections:
        raise ConversionError(
            "the model holds no HashEmbeddingBagCollection or HashEmbeddingCollection.",
            reason="no_collection",
            what_to_do="build its tables with them, or call recfx.convert(model) first.",
        )
    planned: Any = plan.plan if isinstance(plan, ShardingPlan) else {}
    for path, collection in collections.items():
        missing = [table.name for table in collection.tables if table.name not in planned.get(path, {})]
        if missing or not isinstance(plan, ShardingPlan):
            raise ConversionError(
                f"plan is {type_of(plan)} that does not name table {missing[0]!r}.",
                reason="npu_plan",
                module_path=path,
                what_to_do="pass EmbeddingShardingPlanner(...).collective_plan(module, sharders, WORLD) of this model.",
            )
