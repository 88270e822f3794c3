"""What is imported when, and that torch and TorchRec know about converted collections as soon as there can be one."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import recfx
from tests.inspect.models import dlrm
from tests.support.forked_script import run_script

ROOT = Path(__file__).resolve().parents[1]
HEAVY = {"torch", "torchrec", "fbgemm_gpu", "triton", "sympy", "numpy", "rich", "tqdm"}


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--version"], 0, recfx.__version__),
        (["--help"], 0, "explain "),
        (["plan", "--help"], 0, "default: 512)"),
        (["explain"], 2, "required: module:factory"),
        (["doctor", "--device", "tpu"], 2, "none of cpu, cuda, npu"),
    ],
)
def test_the_command_line_explains_itself_without_torch(arguments: list[str], status: int, said: str) -> None:
    """In a new interpreter."""
    code = f"""
import runpy, sys
sys.argv[1:] = {arguments!r}
try:
    runpy.run_module("recfx", run_name="__main__", alter_sys=True)
finally:
    print("imported", sorted({HEAVY!r} & sys.modules.keys()))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, "Traceback" in done.stderr) == (status, False), done.stderr
    assert said in done.stdout + done.stderr
    assert "imported []" in done.stdout


IMPORTS = """
import sys
import torchrec
before = set(sys.modules)
import recfx
at_import = sorted(set(sys.modules) - before)
assert [name for name in at_import if name.split(".")[0] != "recfx"] == [], at_import
assert len(at_import) < 15, at_import
assert not hasattr(recfx, "__wrapped__")
assert "__all__" not in vars(recfx)
recfx.convert
recfx.planner.pricing.hardware.H100
brought = {".".join(name.split(".")[:1 + name.startswith("torch")]) for name in set(sys.modules) - before}
assert brought <= {"recfx", "rich", "torchrec.modules", "torchrec.distributed"}, brought
"""


def test_the_public_names_bring_recfx_alone() -> None:
    """Torch's compilers and functional optimizers take longer to import than recfx, and few programs need them."""
    done = run_script(IMPORTS)
    assert done.returncode == 0, done.stderr


EXTENDED = """
from torch.export import _trace
from torch.optim.swa_utils import AveragedModel
from torchrec.distributed.model_parallel import DistributedModelParallel

def extended():
    functions = DistributedModelParallel.__init__, AveragedModel.update_parameters, _trace._export
    return [hasattr(function, "_recfx_extends") for function in functions]

assert not any(extended())
{}
assert all(extended())
"""
MADE = """
from torchrec import EmbeddingBagConfig
from recfx.collections.hash_collections import HashEmbeddingBagCollection
assert not any(extended())
table = EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=4, feature_names=["f"])
HashEmbeddingBagCollection(tables=[table])
"""
CONVERTED = """
from recfx.conversion.convert import convert
from tests.inspect.models import dlrm
convert(dlrm()[0])
"""
READ = """
import pickle, sys
with open(sys.argv[1], "rb") as file:
    model = pickle.load(file)
"""


@pytest.mark.parametrize("code", [MADE, CONVERTED, READ], ids=["made", "converted", "read"])
def test_torch_and_torchrec_are_extended_for_the_first_converted_collection(code: str, tmp_path: Path) -> None:
    """In a process that has imported torch and TorchRec, and nothing of recfx."""
    saved = tmp_path / "model"
    saved.write_bytes(pickle.dumps(recfx.convert(dlrm()[0])))
    done = run_script(EXTENDED.format(code), str(saved), directory=ROOT)
    assert done.returncode == 0, done.stderr
