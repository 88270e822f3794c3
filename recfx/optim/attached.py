"""The optimizers that ``apply_optimizer_in_backward`` attached to a parameter, read from the attributes torch sets.

Torch keeps them on the parameter itself, in ``_in_backward_optimizers``, along with the classes and arguments that they
were created from. Only this file knows these names. It imports ``torch.distributed.optim``, which compiles a dozen
optimizers, where one is attached.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_OPTIMIZERS, _CLASSES, _ARGUMENTS = "_in_backward_optimizers", "_optimizer_classes", "_optimizer_kwargs"
_FORM = "_recfx_form_of_placeholder"  # recfx's own, beside them: it lives as long as the parameter


def attached_optimizers(weight: torch.Tensor) -> Sequence[Any]:
    """The optimizers in backward of ``weight``, in the order in which they were attached; empty if there are none."""
    return weight.__dict__.get(_OPTIMIZERS) or ()


def all_attached(weights: Sequence[torch.Tensor]) -> list[Any]:
    """The optimizers in backward of all ``weights``, in some models of thousands."""
    return [optimizer for weight in weights for optimizer in weight.__dict__.get(_OPTIMIZERS) or ()]


def number_attached(weight: torch.Tensor) -> int:
    """The number of ``attached_optimizers``, read in a way that torch.compile can follow, and checks in each call."""
    return len(getattr(weight, _OPTIMIZERS, ()))


def attached_classes(weight: torch.Tensor) -> list[tuple[type, Mapping[str, Any]]]:
    """The classes and arguments from which the optimizers in backward of ``weight`` were created."""
    return list(zip(weight.__dict__.get(_CLASSES) or (), weight.__dict__.get(_ARGUMENTS) or (), strict=True))


def set_attached(weight: torch.Tensor, optimizers: Sequence[Any]) -> None:
    """Replace the optimizers attached to ``weight`` by ``optimizers``; none of these steps by itself."""
    weight.__dict__[_OPTIMIZERS] = list(optimizers)


def kept_form(weight: torch.Tensor, placeholder: object) -> Any:
    """What ``keep_form`` was given for this ``placeholder``; None if there is nothing."""
    form = weight.__dict__.get(_FORM)
    return form[1] if form is not None and form[0] is placeholder else None


def keep_form(weight: torch.Tensor, placeholder: object, form: object) -> None:
    """Keep what trains ``weight`` in the place of one of TorchRec's placeholders, which have neither state nor settings
    of their own. Copies of a parameter do not have it.
    """
    weight.__dict__[_FORM] = placeholder, form


def run_in_backward(optimizer_class: type, weight: nn.Parameter, settings: dict[str, Any]) -> None:
    """Attach an optimizer to ``weight`` that steps in its backward, with torch's function, which is not public yet."""
    from torch.distributed import optim as distributed_optim

    with _trained(weight):
        distributed_optim._apply_optimizer_in_backward(optimizer_class, [weight], settings)  # type: ignore[attr-defined]


def take_over_step(weight: torch.Tensor, step: Callable[[], None]) -> Any:
    """Have ``step`` called, instead of what torch calls to step ``weight``, when a backward pass has accumulated the
    whole gradient of ``weight`` that comes through autograd. The caller keeps the node that this returns, without which
    the hook is lost: torch does so only if it has attached an optimizer.
    """
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map as hook_handles

    with _trained(weight):
        viewed: Any = weight.view_as(weight).grad_fn
    node = viewed.next_functions[0][0]
    for handle in hook_handles.get(weight, ()):
        handle.remove()
    hook_handles[weight] = [node.register_hook(lambda *gradients: step())]
    return node


@contextmanager
def _trained(weight: torch.Tensor) -> Iterator[None]:
    """A context with autograd in which the weight is not frozen: otherwise it has no ``AccumulateGrad`` node."""
    trained = weight.requires_grad
    with torch.inference_mode(False), torch.enable_grad():
        weight.requires_grad_()
        try:
            yield
        finally:
            weight.requires_grad_(trained)
