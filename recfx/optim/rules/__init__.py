"""The rules of fused optimizers. A new rule is one file, and one line here."""

from fbgemm_gpu.split_embedding_configs import EmbOptimType

from recfx.optim.rules.adagrad import ADAGRAD
from recfx.optim.rules.adam import ADAM, PARTIAL_ROWWISE_ADAM
from recfx.optim.rules.lamb import LAMB, PARTIAL_ROWWISE_LAMB
from recfx.optim.rules.lars_sgd import LARS_SGD
from recfx.optim.rules.rowwise_adagrad import ROWWISE_ADAGRAD, ROWWISE_ADAGRAD_DECOUPLED
from recfx.optim.rules.rule import COMMON_SETTINGS, Rule, Setting
from recfx.optim.rules.sgd import SGD

RULES: list[Rule] = [
    SGD,
    ADAGRAD,
    ROWWISE_ADAGRAD,
    ROWWISE_ADAGRAD_DECOUPLED,
    ADAM,
    PARTIAL_ROWWISE_ADAM,
    LAMB,
    PARTIAL_ROWWISE_LAMB,
    LARS_SGD,
]


def rule_named(name: str) -> Rule | None:
    """The rule of that name, or None."""
    return next((rule for rule in RULES if rule.name == name), None)


def rule_of_class(optimizer: type) -> Rule | None:
    """The rule for an optimizer class, or None. The class must match exactly: subclasses do not count."""
    return next((rule for rule in RULES if optimizer in rule.classes), None)


def rule_of_type(optimizer: object) -> Rule | None:
    """The rule for the value of ``optimizer`` in TorchRec's ``fused_params``, or None."""
    if not isinstance(optimizer, EmbOptimType):
        return None
    return next((rule for rule in RULES if optimizer in rule.fused_types), None)


def known_settings() -> tuple[Setting, ...]:
    """Every setting that some rule reads."""
    return tuple(dict.fromkeys([*COMMON_SETTINGS, *(setting for rule in RULES for setting in rule.settings)]))


def class_names() -> str:
    """The classes of torch and TorchRec that users can attach, for messages: ``SGD, Adagrad, ..., or LarsSGD``."""
    attachable = [(*rule.placeholders, rule.dense_class)[0] for rule in RULES]
    *names, last = [optimizer.__name__ for optimizer in attachable if not optimizer.__module__.startswith("recfx.")]
    return f"{', '.join(names)} or {last}"


__all__ = ["RULES", "class_names", "known_settings", "rule_named", "rule_of_class", "rule_of_type"]
