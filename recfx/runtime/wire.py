"""The precision in which ranks send rows and gradients: read from TorchRec's codecs, and made into codecs again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrec.distributed.types import QuantizedCommCodecs

from recfx.errors import ConversionError, type_of
from recfx.ir.ways_back import COMM_OPS, Precision, Wire, Wires


def wires_of(registry: Mapping[str, QuantizedCommCodecs] | None) -> Wires:
    """What a sharder's ``qcomm_codecs_registry`` says, without what it leaves in float32.

    Raises:
        ConversionError: ``quantized_communication``: other precisions, codecs of other classes, unknown names.
    """
    wires = {}
    for name, codecs in (registry or {}).items():
        if name not in COMM_OPS.values():
            raise _refused(f"{name!r} is none of {', '.join(dict.fromkeys(COMM_OPS.values()))}")
        if not isinstance(codecs, QuantizedCommCodecs):
            raise _refused(f"{name} has {type_of(codecs)}")
        wires[name] = Wire(_precision(name, codecs.forward), _precision(name, codecs.backward))
    return {name: wire for name, wire in wires.items() if wire != Wire()}


def _precision(name: str, codec: Any) -> Precision:
    from fbgemm_gpu.quantize_comm import QuantizedCommCodec  # takes long, and few programs need it

    if type(codec) is not QuantizedCommCodec:
        raise _refused(f"{name} has {type_of(codec)}")
    precision = codec._comm_precision.value
    if precision not in ("fp32", "fp16", "bf16"):
        raise _refused(f"{name} has {precision}")
    return Precision(precision, codec._loss_scale)


def _refused(why: str) -> ConversionError:
    return ConversionError(
        f"rows cannot be sent as qcomm_codecs_registry says: {why}.",
        reason="quantized_communication",
        what_to_do="use what torchrec.distributed.fbgemm_qcomm_codec.get_qcomm_codecs_registry returns for "
        "QCommsConfig(CommType.FP16, CommType.BF16), in which both can be FP32, FP16 or BF16; or leave it out: rows "
        "are then sent as they are.",
    )


def codecs_of(wire: Wire) -> QuantizedCommCodecs:
    """TorchRec's codecs for its modules that send rows."""
    from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs

    forward, backward = wire
    config = QCommsConfig(
        forward_precision=CommType(forward.name),
        backward_precision=CommType(backward.name),
        forward_loss_scale=forward.loss_scale,
        backward_loss_scale=backward.loss_scale,
    )
    return get_qcomm_codecs(config)
