"""The model that the command line names: ``package.module:factory``, or ``path/to/file.py:factory``.

Nothing is known about the file: it may print, fail, or call ``sys.exit``. Whatever prevents a model is one line.
"""

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn

from recfx.commandline import UsageError
from recfx.errors import type_of


class Made(NamedTuple):
    """What a factory returned: its name as it was given, the model, and one call of it, if there is one."""

    name: str
    model: nn.Module
    sample: Any


def make(name: str) -> Made:
    """Import the factory and call it; ``UsageError`` if it cannot be imported or called, or returns no model."""
    factory = _factory(name)
    made = _run(factory, f"{name} ")
    if isinstance(made, nn.Module):
        return Made(name, made, None)
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        return Made(name, *made)
    raise UsageError(f"{name} returns {type_of(made)}: return a model, or (model, sample)")


def _factory(name: str) -> Callable[[], object]:
    module_name, _, attribute = name.rpartition(":")
    if not (module_name and attribute):
        raise UsageError(f"{name!r} is neither package.module:factory nor path/to/file.py:factory")
    is_file = module_name.endswith(".py") or os.sep in module_name
    factory: object = _run(lambda: (_of_file if is_file else _of_name)(module_name), f"importing {module_name} ")
    for part in attribute.split("."):
        if not hasattr(factory, part):
            raise UsageError(f"{module_name!r} has no {attribute!r}")
        factory = getattr(factory, part)
    if isinstance(factory, nn.Module) or not callable(factory):
        raise UsageError(f"{name} is {type_of(factory)}, not a function that returns a model")
    return factory


def _of_name(name: str) -> ModuleType:
    sys.path.insert(0, os.getcwd())  # where `python -m recfx` looks anyway, and the command `recfx` would not
    return importlib.import_module(name)


def _of_file(name: str) -> ModuleType:
    """The module of a file; one in a package is imported as part of it, so that its relative imports work."""
    path = Path(name).resolve()
    if not (path.is_file() and path.suffix == ".py"):
        raise UsageError(f"there is no Python file {name!r}")
    names, folder = [path.stem], path.parent
    while (folder / "__init__.py").is_file():
        names, folder = [folder.name, *names], folder.parent
    sys.path.insert(0, str(folder))  # where Python itself looks if it runs the file
    if len(names) > 1:
        return importlib.import_module(".".join(names))
    spec: Any = importlib.util.spec_from_file_location(f"_recfx_{path.stem}", path)  # other modules may have its name
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # classes of the model are looked up there
    spec.loader.exec_module(module)
    return module


def _run(function: Callable[[], Any], what: str) -> Any:
    """Run the user's code; whatever it raises, except Ctrl-C, becomes one line."""
    try:
        return function()
    except (UsageError, KeyboardInterrupt):
        raise
    except SystemExit as error:
        raise UsageError(f"{what}calls sys.exit({error.code!r})") from error
    except BaseException as error:  # pytest.skip's, and those of asyncio, are not an Exception
        text = traceback.format_exception_only(error)[-1].strip().partition("\n")[0]
        raise UsageError(f"{what}raises {text}") from error
