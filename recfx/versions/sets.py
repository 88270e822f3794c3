"""The sets of packages that recfx runs on."""

import re
from collections.abc import Collection
from dataclasses import dataclass

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
"""The minor versions of Python that recfx runs on."""

MODULES = ("torch", "torchrec", "fbgemm_gpu")
"""The packages whose versions have to fit, as Python imports them."""


@dataclass(frozen=True)
class VersionSet:
    """Releases that are built for each other, as tested. Other releases of the same minor versions fit as well.

    ``fbgemm`` is ``fbgemm-gpu-cpu`` on hosts without CUDA, ``fbgemm-gpu`` on others; ``triton`` is the one that torch's
    own wheels ask for, ``triton_ascend`` that for Ascend NPUs, which has wheels for Python 3.10 and 3.11.
    """

    torch: str
    torchrec: str
    fbgemm: str
    torch_npu: str
    triton: str
    tensordict: str
    triton_ascend: str = "3.2.0"

    @property
    def name(self) -> str:
        """The minor version of torch: ``"2.7"``."""
        return minor(self.torch)

    def install(self, device: str, names: Collection[str] = MODULES) -> str:
        """The command that installs the set for ``"cpu"``, ``"cuda"`` or ``"npu"``, or some of its packages, which then
        leaves the torch that is there.
        """
        if device == "cuda" and "torch" in names:
            return f"pip install torch=={self.torch} fbgemm-gpu=={self.fbgemm} torchrec=={self.torchrec}"
        adapter = f" torch_npu=={self.torch_npu}" if device == "npu" else ""
        # TorchRec asks for fbgemm-gpu, which is built for CUDA and overwrites the files of fbgemm-gpu-cpu.
        fbgemm = "fbgemm-gpu" if device == "cuda" else "fbgemm-gpu-cpu"
        asked = {
            "torch": f"torch=={self.torch}{adapter}",
            "fbgemm_gpu": f"{fbgemm}=={self.fbgemm}",
            # iopath is for TorchRec 1.4 and older. This tensordict takes the torch that is there.
            "torchrec": f"iopath tensordict=={self.tensordict} torchmetrics==1.0.3 pyre-extensions tqdm"
            f" && pip install --no-deps torchrec=={self.torchrec}",
        }
        return f"pip install {' '.join(asked[name] for name in asked if name in names)}"


SETS = (
    VersionSet("2.7.1", "1.2.0", "1.2.0", "2.7.1.post11", "3.3.1", "0.9.1"),
    VersionSet("2.9.0", "1.4.0", "1.4.0", "2.9.0.post9", "3.5.0", "0.10.0"),
    VersionSet("2.10.0", "1.5.0", "1.5.0", "2.10.0.post7", "3.6.0", "0.11.0"),
    VersionSet("2.11.0", "1.6.1", "1.6.0", "2.11.0.post3", "3.6.0", "0.12.4"),
    VersionSet("2.12.1", "1.7.0", "1.7.0", "2.12.0.post3", "3.7.1", "0.13.0"),
    VersionSet("2.13.0", "1.8.0", "1.8.0", "2.13.0", "3.7.0", "0.15.3"),
    VersionSet("2.14.1", "1.9.2", "1.9.0", "2.14.0", "3.8.0", "0.15.3"),
)
"""From the oldest to the newest."""

DEFAULT = SETS[-2]
"""The one that a checkout installs."""


def minor(version: str) -> str:
    """``"2.7"`` for ``"2.7.1.post2"``, ``"2.7.0a0+git1234567"`` and ``"2.7.1+cpu"``; ``""`` for no such numbers."""
    numbers = re.match(r"\d+\.\d+", version)
    return numbers[0] if numbers else ""


def set_of(torch: str) -> VersionSet | None:
    """The set for a version of torch; ``None`` if there is none."""
    return next((versions for versions in SETS if versions.name == minor(torch)), None)


def is_between(torch: str) -> bool:
    """Whether a version of torch has no set, but sets are older and newer."""
    return set_of(torch) is None and _numbers(SETS[0].name) < _numbers(minor(torch)) < _numbers(SETS[-1].name)


def _numbers(name: str) -> list[int]:
    return [int(number) for number in name.split(".") if number]


def nearest(torch: str) -> VersionSet:
    """The set for a version of torch, the next newer one, or the newest."""
    numbers = _numbers(minor(torch))
    return next((versions for versions in SETS if _numbers(versions.name) >= numbers), SETS[-1])
