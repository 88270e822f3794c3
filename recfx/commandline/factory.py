"""The model that the command line names: ``package.module:factory``, or ``path/to/file.py:factory``.

Nothing is known about the file: it may print, fail, or call ``sys.exit``. Whatever prevents a model is one line.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn

from recfx.commandline.command import NoModelError
from recfx.errors import below_current, type_of


class Made(NamedTuple):
    """What a factory returned.

    Args:
        name: the factory, as it was given.
        model: the model.
        sample: one call of it; None if there is none.
    """

    name: str
    model: nn.Module
    sample: Any


def make(name: str) -> Made:
    """Import the factory and call it.

    Args:
        name: ``package.module:factory`` or ``path/to/file.py:factory``.

    Raises:
        NoModelError: it cannot be imported or called, or returns something else.
    """
    function = _factory(name)
    made = _run(function, f"{name} ")
    if isinstance(made, nn.Module):
        return Made(name, made, None)
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        return Made(name, made[0], made[1])
    if isinstance(made, tuple):
        returned = f"({', '.join(type(part).__name__ for part in made[:4])}{', ...' if len(made) > 4 else ''})"
    else:
        returned = type_of(made)
    raise NoModelError(f"{name} returns {returned}: return a model, or (model, sample)")


def _factory(name: str) -> Callable[[], object]:
    module_name, _, attribute = name.rpartition(":")
    if not (module_name and attribute):
        raise NoModelError(f"{name!r} is neither package.module:factory nor path/to/file.py:factory")
    if module_name.endswith(".py") or os.sep in module_name:
        module = _module_of_file(module_name)
    else:
        module = _module_of_name(module_name)
    factory: object = module
    for part in attribute.split("."):
        if not hasattr(factory, part):
            file = getattr(module, "__file__", None)  # a package hides a file of the same name
            where = f" ({_short(file)})" if file and not module_name.endswith(".py") else ""
            raise NoModelError(f"{module_name!r}{where} has no {attribute!r}{_functions_of(module)}")
        factory = getattr(factory, part)
    if isinstance(factory, nn.Module) or not callable(factory):
        raise NoModelError(f"{name} is {type_of(factory)}, not a function that returns a model")
    if needed := _needed_arguments(factory):
        raise NoModelError(f"{name} needs arguments ({', '.join(needed)}): name a function that takes none")
    return factory


def _module_of_name(name: str) -> ModuleType:
    here = os.getcwd()
    sys.path.insert(0, here)  # where `python -m recfx` looks anyway, and the command `recfx` would not
    if name.startswith("."):
        raise NoModelError(f"name the module {name!r} as it is imported, from the top package on: package.module")

    def load() -> ModuleType:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # the module exists, but something that it imports does not
            raise NoModelError(f"there is no module {error.name!r} (looked in {here} and in sys.path)") from None

    return _run(load, f"importing {name} ")


def _module_of_file(name: str) -> ModuleType:
    """The module of a file; one in a package is imported as part of it, so that its relative imports work."""
    path = Path(name).resolve()
    if not path.is_file():
        raise NoModelError(f"there is no file {name!r}")
    if path.suffix != ".py":
        raise NoModelError(f"{name!r} is not a Python file")
    names, folder = [path.stem], path.parent
    while (folder / "__init__.py").is_file() and folder != folder.parent:
        names, folder = [folder.name, *names], folder.parent
    sys.path.insert(0, str(folder))  # where Python itself looks if it runs the file
    top = sys.modules.get(names[0])
    if names[0] not in sys.builtin_module_names and (top is None or _file_of(top).is_relative_to(folder)):
        module = _run(lambda: importlib.import_module(".".join(names)), f"importing {name} ")
        if _file_of(module) == path:
            return module
    # Another module has this name, so it gets one of its own.
    spec = importlib.util.spec_from_file_location(f"_recfx_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module, loader = importlib.util.module_from_spec(spec), spec.loader
    sys.modules[spec.name] = module  # classes of the model are looked up there
    _run(lambda: loader.exec_module(module), f"importing {name} ")
    return module


def _file_of(module: ModuleType) -> Path:
    return Path(getattr(module, "__file__", None) or os.devnull).resolve()


def _run(function: Callable[[], Any], what: str) -> Any:
    """Run the user's code; whatever it raises, except Ctrl-C, becomes one line."""
    try:
        return function()
    except NoModelError:
        raise
    except SystemExit as error:
        code = "" if error.code is None else repr(error.code)
        raise NoModelError(f"{what}calls sys.exit({code}){_at(error)}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # pytest.skip's, and those of asyncio, are not an Exception
        text = _text_of(error).strip().partition("\n")[0]
        raised = f"{type(error).__name__}: {text}" if text else type(error).__name__
        raise NoModelError(f"{what}raises {raised}{_at(error)}") from error


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # its own __str__ fails; its type and place are shown anyway
        return ""


def _at(error: BaseException) -> str:
    """The last line of code that is not in a library, of those that led to the error."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({_short(error.filename)}:{error.lineno})"
    here = str(Path(__file__))
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != here and not frame.filename.startswith("<")
    ]
    own = [frame for frame in frames if "site-packages" not in frame.filename and not _is_stdlib(frame.filename)]
    return f" ({_short(own[-1].filename)}:{own[-1].lineno})" if own else ""


def _is_stdlib(file: str) -> bool:
    return Path(file).is_relative_to(Path(os.__file__).parent)


def _short(file: str) -> str:
    return str(below_current(Path(file)))


def _functions_of(module: ModuleType) -> str:
    """What could have been meant: the module's own functions that take no arguments."""
    own = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
        and not _needed_arguments(value)
    ]
    return f"; it has {', '.join(own[:4])}{' and others' if len(own) > 4 else ''}" if own else ""


def _needed_arguments(function: Callable[..., object]) -> list[str]:
    """Names of the arguments without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # built-in functions may have no signature
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind not in optional
    ]
