"""What differs between the versions of torch and TorchRec that recfx runs on.

Each name is what the newest version has, or what stands for it in a version that lacks it; which one is found by
looking, not by comparing versions. It is the only module that does so, and it imports nothing of recfx.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch.distributed import distributed_c10d as c10d
from torch.fx import _symbolic_trace
from torchrec.distributed.planner import Topology
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


class Absent:
    """Stands for a class that a version lacks: there are no objects of it."""


def _takes(function: Callable[..., Any], name: str) -> bool:
    return name in inspect.signature(function).parameters


# Tells torch.compile that an operator reads or changes what a replayed CUDA graph would not; torch 2.7 cannot be told.
_CAN_BE_TOLD = hasattr(torch.Tag, "cudagraph_unsafe") and _takes(torch.library.custom_op, "tags")
OUTSIDE_CUDA_GRAPHS = {"tags": (torch.Tag.cudagraph_unsafe,)} if _CAN_BE_TOLD else {}


def _is_fx_tracing_alone() -> bool:
    return _symbolic_trace._is_fx_tracing_flag and not torch.compiler.is_compiling()  # its function warns


# Whether torch.fx traces, and not torch.export; torch 2.7 does not tell, and 2.14 has the flag elsewhere.
is_fx_symbolic_tracing: Callable[[], bool] = getattr(_symbolic_trace, "is_fx_symbolic_tracing", _is_fx_tracing_alone)

# torch 2.9 and older have no type of their own for names of process groups.
GroupName: Callable[[str], Any] = getattr(c10d, "GroupName", str)

# What torch.utils.checkpoint calls if use_reentrant is false: another function in torch 2.14 than in older versions.
CHECKPOINT_WITHOUT_REENTRY = next(
    name
    for name in ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
    if hasattr(torch.utils.checkpoint, name)
)

# TorchRec 1.8 and newer warn of a topology that Meta's factory has not made, unless they are told otherwise.
BY_FACTORY = {"created_by_factory": True} if _takes(Topology, "created_by_factory") else {}
make_topology: Callable[..., Topology] = functools.partial(Topology, **BY_FACTORY)


# With which torch.compile compares the arguments of each call. Without it, tensors are compared in Python.
_TensorGuards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)


def watch_tensors(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """Tells, when it is called with as many tensors, whether each has the device, dtype, sizes and strides that these
    have now, and whether it is negated as they are; False if it does not know. None: it never knows.
    """
    try:
        check: Callable[..., bool] = _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return check if check(*tensors) else None
    except (TypeError, RuntimeError):  # there is none, or it takes no such tensors
        return None


try:
    from torchrec.distributed.train_pipeline.runtime_forwards import BaseForward
except ImportError:  # TorchRec 1.2 has them elsewhere
    from torchrec.distributed.train_pipeline.utils import BaseForward

try:
    from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec
except ImportError:
    try:  # TorchRec 1.4 calls it so
        from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTracker as ModelDeltaTrackerTrec
    except ImportError:  # TorchRec 1.2 has none
        ModelDeltaTrackerTrec = Absent

try:
    from torchrec.distributed.model_tracker.trackers.raw_id_tracker import RawIdTracker
except ImportError:  # TorchRec 1.4 and older have none
    RawIdTracker = Absent

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # they call torch.jit.script, of which torch 2.14 warns
        from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
except ImportError:  # TorchRec 1.2 has none
    HashZchManagedCollisionModule = Absent

try:
    from torchrec.modules.pec_embedding_modules import PECEmbeddingCollection
except ImportError:  # TorchRec 1.6 and older have none
    PECEmbeddingCollection = Absent


def let_files_take_batches() -> None:
    """Give a ``KeyedJaggedTensor`` all attributes that the code in a TorchScript file may look for, which are those of
    the TorchRec that wrote the file. TorchRec 1.2 lacks one of them, which only torch.compile uses.
    """
    name = "_pt2_stride_per_key_per_rank"
    if not hasattr(KeyedJaggedTensor.empty(), name):
        setattr(KeyedJaggedTensor, name, None)


def pt2_reader() -> Callable[..., Any] | None:
    """What reads an archive; torch 2.7 lays them out differently, with pickles in them. It is imported when it is
    needed, and torch.export's tracer with it.
    """
    try:
        from torch.export.pt2_archive._package import load_pt2
    except ImportError:
        return None
    return load_pt2


__all__ = [
    "CHECKPOINT_WITHOUT_REENTRY",
    "Absent",
    "BaseForward",
    "GroupName",
    "HashZchManagedCollisionModule",
    "ModelDeltaTrackerTrec",
    "PECEmbeddingCollection",
    "RawIdTracker",
    "is_fx_symbolic_tracing",
    "let_files_take_batches",
    "make_topology",
    "pt2_reader",
]
