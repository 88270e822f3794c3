"""Collections that the model also reaches from places where a conversion cannot replace them.

The converted model would go on using the original there.

Plain attributes that refer to a collection, or to a module around one, are changed to refer to the converted one
(``recfx.collections.copy_modules``). What is left is refused here: generators and the like, and what code reads by
itself, such as globals. Code that reads such a place does not necessarily call the collection: its source may show that
(``recfx.collections.code_reads``), and verification, which counts calls, finds out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from recfx.collections.copy_modules import replace_in_place
from recfx.collections.find_references import References
from recfx.collections.object_kinds import Edge, attributes, hooks_of
from recfx.discovery.classify import CONVERTIBLE, Finding
from recfx.errors import Diagnostic, Severity

BYPASSED = "bypassed_collection"
_ADVICE = (
    "let the model reach it through attributes of its modules (self.ebc, or an attribute of a helper object); if code "
    "reads it there but does not call it, convert with a sample; or leave it as it is with on_unsupported='keep'."
)


def find_bypassed(model: nn.Module, findings: list[Finding]) -> None:
    """Refuse the convertible collections whose originals the model would go on using.

    If code merely reads something that refers to a collection, counting calls may clear it: it is only ``suspected``.
    If it can be seen that the code calls nothing from there, it is ``never_called`` from there.
    """
    convertible = {id(finding.module): finding for finding in findings if finding.status == CONVERTIBLE}
    if not convertible:
        return
    targets = _with_holders(model, set(convertible))
    for fixed in References(targets, _starts(model, stop_at=convertible), code=True).fixed():
        for target in fixed.targets:
            for module in targets[target].modules():
                finding = convertible.get(id(module))
                if finding is not None and finding.status == CONVERTIBLE:
                    what = "the collection" if id(module) == target else "a module that holds it"
                    how = f"{what} is also reached by {fixed.where}: {fixed.why}"
                    refusal = bypassed(finding.path, how)
                    if fixed.never_called:
                        finding.never_called = finding.never_called or how
                    elif fixed.read_by_code:
                        finding.suspected = finding.suspected or refusal
                    else:
                        finding.refuse(refusal)


def way_around(model: nn.Module, originals: Iterable[nn.Module]) -> str:
    """How ``model`` reaches one of ``originals``, which are not modules of it; ``""`` if unknown."""
    targets = {id(module): module for module in originals}
    for module in model.modules():
        targets.pop(id(module), None)
    references = References(targets, _starts(model, stop_at={}), code=True)
    return next((way for target in targets if (way := references.way_to(target))), "")


def bypassed(path: str, how: str) -> Diagnostic:
    """The refusal of a collection that the converted model does not call where the original does."""
    message = f"{how}. The converted model would go on using the original there."
    return Diagnostic(BYPASSED, path, message, _ADVICE, Severity.ERROR)


def _with_holders(model: nn.Module, collections: set[int]) -> dict[int, nn.Module]:
    """The collections, and every module of ``model`` that has one inside, by ``id``."""
    holders: dict[int, nn.Module] = {}
    waiting, above = [model], dict[int, list[nn.Module]]()
    while waiting:
        module = waiting.pop()
        if id(module) in collections:
            holders[id(module)] = module
            continue
        for child in module._modules.values():
            if child is not None:
                if id(child) not in above:
                    waiting.append(child)
                above.setdefault(id(child), []).append(module)
    climbing = list(holders)
    while climbing:
        for parent in above.get(climbing.pop(), ()):
            if id(parent) not in holders:
                holders[id(parent)] = parent
                climbing.append(id(parent))
    return holders


def held_by_hooks(converted: nn.Module, model: nn.Module, findings: list[Finding]) -> list[Diagnostic]:
    """Notes on hooks of the converted copy of ``model`` that refer to collections of ``model`` itself.

    A conversion that copies modules leaves objects as they are that only hooks hold: what watches a model also watches
    the converted one. But if such an object calls a collection, it calls the original.
    """
    hooks = {id(module): list(hooks_of(module)) for module in converted.modules()}
    if not any(hooks.values()):
        return []
    starts = [(name, module) for name, module, _ in _starts(converted, stop_at={})]
    targets = _with_holders(model, {id(finding.module) for finding in findings if finding.status == CONVERTIBLE})
    notes = []
    for name, hooked in starts:
        if not hooks[id(hooked)]:
            continue
        only = [(path, module, hooks[id(module)] if module is hooked else []) for path, module in starts]
        references = References(targets, only)
        way = next((way for target in targets if (way := references.way_to(target))), "")
        if way:
            message = f"the converted model has the same hook, and it refers to the original by {way}."
            what_to_do = (
                "if the hook calls a collection, register one on the converted model whose object refers to that; with "
                "a sample, calls are counted."
            )
            notes.append(Diagnostic("held_by_hook", "" if hooked is converted else name, message, what_to_do))
    return notes


def _starts(model: nn.Module, stop_at: Mapping[int, Any]) -> list[tuple[str, nn.Module, list[Edge]]]:
    """Name, module, plain attributes and hooks of all modules; those inside ``stop_at`` are left out."""
    roots: dict[int, tuple[str, nn.Module]] = {}
    waiting = [(type(model).__name__, "", model)]
    while waiting:
        name, path, module = waiting.pop()
        if id(module) in roots:
            continue
        roots[id(module)] = (name, module)
        if id(module) not in stop_at:
            for child_name, child in module._modules.items():
                if child is not None:
                    below = f"{path}.{child_name}" if path else child_name
                    waiting.append((below, below, child))
    return [(name, module, [*attributes(module), *hooks_of(module)]) for name, module in roots.values()]


def put_back(model: nn.Module, originals: Mapping[int, nn.Module], copies: list[nn.Module]) -> str:
    """Let what ``model`` refers to by other ways than its modules refer to originals again, not to traced copies.

    A trace runs the model's code on a copy of its modules. The copy shares helper objects that refer to no module with
    the model, and code may put a module of the copy into them: a helper that remembers its collection, say.

    Args:
        originals: the module of ``model`` that each copy stands for, by ``id`` of the copy.
        copies: the copies.

    Returns:
        how ``model`` still reaches one of the copies, from a place that cannot be changed; ``""`` if it does not.
    """
    if not way_around(model, copies):
        return ""
    replace_in_place(model, originals)
    return way_around(model, copies)
