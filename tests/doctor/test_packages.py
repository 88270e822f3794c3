"""``import recfx`` looks whether the packages that are installed fit, before it imports them."""

import json
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

import pytest

from recfx.commandline.doctor import packages
from recfx.commandline.doctor.packages import ANY_VERSIONS, refused, unfit
from recfx.versions.sets import DEFAULT, MODULES, SETS, minor

ROOT = Path(__file__).parents[2]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that alone is looked in, as if it were ``site-packages``."""

    def find(module: str) -> ModuleSpec | None:
        return PathFinder.find_spec(module, [str(tmp_path)])

    monkeypatch.setattr(packages.importlib.util, "find_spec", find)
    monkeypatch.delenv(ANY_VERSIONS, raising=False)
    return tmp_path


def put(place: Path, torch: str, torchrec: str, fbgemm: str, variant: str = "cpu") -> None:
    """Packages that say that they have these versions, in the words of the true ones, and do nothing."""
    texts = {
        "torch/version.py": f"__version__ = '{torch}'\ndebug = False\n",
        "torchrec/version.py": f'__version__ = "{torchrec}"\n',
        "fbgemm_gpu/docs/target.default.json.py": json.dumps(
            {"version": fbgemm, "target": "default", "variant": variant}
        ),
    }
    for name, text in texts.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        (place / name.split("/")[0] / "__init__.py").touch()


@pytest.mark.parametrize(
    ("torch", "torchrec", "fbgemm"),
    [
        *((versions.torch, versions.torchrec, versions.fbgemm) for versions in SETS),
        ("2.7.0a0+git1234567", "1.2.0", "1.2.0+cpu"),
        ("2.9.1+cu128", "1.4.0rc1", "1.4.2"),
        ("2.14.0", "1.9.0.dev20260101", ""),  # a build of one's own may not say which version of FBGEMM it is
    ],
)
def test_sets_and_builds_of_the_same_minor_versions_fit(torch: str, torchrec: str, fbgemm: str, place: Path) -> None:
    put(place, torch, torchrec, fbgemm)
    assert unfit() is None


@pytest.mark.parametrize(
    ("torch", "torchrec", "fbgemm", "said", "row"),
    [
        ("2.7.0a0+git1", "1.8.0", "1.2.0", "fbgemm_gpu 1.2.0. The nearest that do: torchrec 1.2.0;", "2.7"),
        ("2.10.1+cpu", "1.5.0", "1.4.0", "fbgemm_gpu 1.4.0. The nearest that do: fbgemm_gpu 1.5.0;", "2.10"),
        ("2.1.0", "0.5.0", "0.5.0", "torch 2.1.0", "2.7"),
        ("3.0.0", "2.0.0", "2.0.0", "torch 3.0.0", "2.14"),
        ("", "1.2.0", "1.2.0", "torch of unknown version", "2.7"),
    ],
)
def test_versions_that_do_not_fit(
    torch: str, torchrec: str, fbgemm: str, said: str, row: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(place, torch, torchrec, fbgemm)
    error = refused()
    assert isinstance(error, ImportError)
    assert error.reason == "versions_unfit"
    assert said in error.message
    (take,) = (versions for versions in SETS if versions.name == row)
    unfit_ones = ["torchrec" if torchrec == "1.8.0" else "fbgemm_gpu"] if take.name == minor(torch) else MODULES
    assert error.what_to_do.startswith(f"{take.install('cpu', unfit_ones)} (or set")
    monkeypatch.setenv(ANY_VERSIONS, "0")
    assert refused() is not None
    monkeypatch.setenv(ANY_VERSIONS, "1")
    with pytest.warns(UserWarning, match="versions_unfit"):
        assert refused() is None


def test_a_torch_between_two_sets_is_a_warning(place: Path) -> None:
    put(place, "2.8.0", "1.3.0", "1.3.0")
    with pytest.warns(UserWarning, match=r"versions_unfit.*torch 2\.8\.0.*The nearest that do: torch 2\.9\.0"):
        assert refused() is None


@pytest.mark.parametrize("module", MODULES)
def test_packages_that_are_missing(module: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(place, DEFAULT.torch, DEFAULT.torchrec, DEFAULT.fbgemm)
    (place / module).rename(place / "elsewhere")
    monkeypatch.setenv(ANY_VERSIONS, "1")  # nobody can do without them
    error = refused()
    assert error is not None
    names = MODULES if module == "torch" else [module]
    assert (error.reason, error.what_to_do) == ("packages_missing", DEFAULT.install("cpu", names))
    assert error.message.endswith(f" {module}.")


def test_fbgemm_for_cuda_needs_a_torch_for_cuda(place: Path) -> None:
    put(place, DEFAULT.torch, DEFAULT.torchrec, DEFAULT.fbgemm, variant="cuda")
    error = refused()
    assert error is not None
    assert error.reason == "fbgemm_needs_cuda"
    assert error.what_to_do.endswith("&& pip install fbgemm-gpu-cpu==1.8.0")
    library = place / "torch" / "lib" / "libtorch_cuda.so"
    library.parent.mkdir()
    library.touch()
    assert unfit() is None


@pytest.mark.parametrize(("adapter", "device"), [("torch_npu", "npu"), ("torch/lib/libtorch_cuda.so", "cuda")])
def test_the_command_is_for_the_device_that_torch_is_for(adapter: str, device: str, place: Path) -> None:
    put(place, "2.6.0", "1.8.0", "1.2.0")
    (place / adapter).mkdir(parents=True)
    error = refused()
    assert error is not None
    assert error.what_to_do.startswith(SETS[0].install(device))


def test_what_is_here_is_right() -> None:
    assert [finding for finding in packages.packages("cpu") if finding.what_to_do] == []


@pytest.mark.parametrize(
    ("module", "failure", "advice"),
    [
        ("torch", "ImportError: libhccl.so: cannot open shared object file", "source CANN"),
        ("fbgemm_gpu", "OSError: libtorch_cuda.so: no such file", "uninstall -y fbgemm-gpu"),
        ("torch", "ValueError: odd", "pip install --force-reinstall torch==2.13.0a0+git1"),  # a vendor's torch stays
        ("fbgemm_gpu", "ValueError: odd", "pip install --force-reinstall --no-deps fbgemm-gpu-cpu==1.8.0"),
        ("torch_npu", "", "pip install"),
        ("fbgemm_gpu", "", "pip install"),
        ("versions", "", "pip install"),
    ],
)
def test_what_cannot_be_imported_or_does_not_fit(
    module: str, failure: str, advice: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = "cpu" if failure else {"torch_npu": "npu", "fbgemm_gpu": "cuda", "versions": "cpu"}[module]
    put(place, "2.13.0a0+git1", "1.5.0" if module == "versions" else DEFAULT.torchrec, DEFAULT.fbgemm)
    monkeypatch.setattr(packages, "_import_failure", lambda name: failure if name == module else "")
    (wrong,) = (finding for finding in packages.packages(device) if finding.what_to_do)
    assert wrong.name == module
    assert failure in wrong.found
    assert advice in wrong.what_to_do


@pytest.mark.parametrize(
    "started",
    [["-c", "import recfx"], ["-X", "utf8", "-m", "recfx", "--help"], ["recfx", "--help"], ["recfx", "doctor"]],
)
def test_a_process_is_told_before_anything_is_imported(started: list[str], tmp_path: Path) -> None:
    put(tmp_path, "2.6.0", "1.1.0", "1.1.0")
    (tmp_path / "torch/lib/libtorch_cuda.so").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "recfx").write_text("from recfx.commandline.main import main; main()")  # as pip installs it
    command = [str(tmp_path / "bin" / "recfx") if word == "recfx" and "-m" not in started else word for word in started]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT)))}
    done = subprocess.run(
        [sys.executable, *command],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    if "doctor" in started:
        assert "Nothing was run: recfx cannot be imported here." in done.stdout
        assert done.stdout.startswith("recfx on cuda: ")
        return
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith(("recfx.errors.VersionError: [versions_unfit]", "recfx: [versions_unfit]"))
    assert ("Traceback" in done.stderr) is ("-c" in started)
