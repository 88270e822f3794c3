"""Models that the project has never seen: files, packages, and code that does not do what it should."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from recfx.commandline.factory import make
from recfx.commandline.main import main

MODELS = "tests.inspect.models"

MODEL = """\
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

class Model(EmbeddingBagCollection):
    pass

def make_model():
    tables = [EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])]
    return Model(tables=tables)
"""


@pytest.fixture(autouse=True)
def _modules_as_before() -> Iterator[None]:
    modules, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if "torch" not in name:
            del sys.modules[name]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "their model" / "my_model.py", MODEL)
    assert type(make(f"{path}:make_model").model).__name__ == "Model"
    monkeypatch.chdir(path.parent)
    made = make("my_model.py:make_model")
    assert (made.name, made.sample) == ("my_model.py:make_model", None)
    assert sys.modules[type(made.model).__module__].__file__ == str(path)  # sources can be found


def test_a_file_in_a_package(tmp_path: Path) -> None:
    write(tmp_path / "their_package" / "__init__.py", "")
    write(tmp_path / "their_package" / "sub" / "__init__.py", "")
    write(tmp_path / "their_package" / "layers.py", MODEL)
    path = write(tmp_path / "their_package" / "sub" / "entry.py", "from ..layers import make_model\n")
    assert isinstance(make(f"{path}:make_model").model, nn.Module)


@pytest.mark.parametrize("name", ["json.py", "torch.py"])
def test_a_file_named_like_another_module(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, MODEL)
    made = make(f"{path}:make_model")
    assert sys.modules[type(made.model).__module__].__file__ == str(path)
    assert getattr(sys.modules[name.removesuffix(".py")], "__file__", "") != str(path)


def test_files_stay_where_the_shell_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the factory goes elsewhere."""
    (tmp_path / "far").mkdir()
    write(
        tmp_path / "goes.py",
        f"import os\nfrom {MODELS} import dlrm\ndef make():\n    os.chdir('far')\n    return dlrm()\n",
    )
    for command, file in (
        ("plan goes.py:make plan.json --ranks 2", "plan.json"),
        ("explain goes.py:make --plan plan.json --html page.html", "page.html"),
        ("draw goes.py:make sub/../x.html --plan plan.json", "x.html"),
        ("export goes.py:make model.pt", "model.pt"),
    ):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "sub").mkdir(exist_ok=True)
        assert main(command.split()) == 0
        assert Path.cwd() == tmp_path / "far"
        assert (tmp_path / file).is_file()


def one_line(factory: str, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The only line that the command prints, without the program's name."""
    with pytest.raises(SystemExit) as raised:
        main(["explain", factory, *options])
    assert raised.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1, printed.err
    assert printed.err.startswith("python -m recfx explain: error: ")
    return printed.err.removeprefix("python -m recfx explain: error: ").removesuffix("\n")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (MODELS, "'tests.inspect.models' is neither package.module:factory nor path/to/file.py:factory"),
        ("tests.inspect.absent:dlrm", "importing tests.inspect.absent raises ModuleNotFoundError"),
        ("absent.py:dlrm", "there is no Python file 'absent.py'"),
        (f"{MODELS}:absent", "'tests.inspect.models' has no 'absent'"),
        (f"{MODELS}:some_model", f"{MODELS}:some_model is an Identity, not a function that returns a model"),
        (f"{MODELS}:batch", f"{MODELS}:batch raises TypeError: batch() missing"),
        (f"{MODELS}:nothing", f"{MODELS}:nothing returns None: return a model, or (model, sample)"),
    ],
)
def test_a_name_that_gives_no_model(name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert one_line(name, capsys).startswith(message)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise ValueError('no such data\\nsecond line')", "{name} raises ValueError: no such data"),
        ("import sys; sys.exit(3)", "{name} calls sys.exit(3)"),
        ("import asyncio; raise asyncio.CancelledError", "{name} raises asyncio.exceptions.CancelledError"),
    ],
)
def test_a_factory_that_fails(code: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "bad_factory.py", f"def make():\n    {code}\n")
    assert one_line(f"{path}:make", capsys).startswith(message.format(name=f"{path}:make", path=path))


def test_traceback_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["explain", f"{MODELS}:fails", "--traceback"])
    printed = capsys.readouterr().err
    assert "Traceback (most recent call last)" in printed
    assert 'raise RuntimeError("the factory\'s own failure")' in printed
    assert "--traceback shows where" not in printed
    assert printed.splitlines()[-1].startswith(
        "python -m recfx explain: error: tests.inspect.models:fails raises Runtime"
    )
