"""The environment of a process that sees a simulated NPU."""

import os
from pathlib import Path

from tests.ascend import tools
from tests.ascend.npu_runtime import round_trips, stand_in

ENTRY_POINT = "[torch.backends]\nrecfx_simulated_npu = tests.ascend.npu_runtime.autoload:autoload\n"


NO_FALLBACK, FALLBACKS = "TORCH_NPU_FALLBACK_CPU_DISABLE", "RECFX_SIMULATED_FALLBACKS"


def is_simulated() -> bool:
    """Whether this process sees one."""
    return "RECFX_SIMULATED_NPUS" in os.environ


def environment(folder: Path, devices: int = 2) -> dict[str, str]:
    """Build the stand-in below ``folder``, and describe it to a process.

    An operator that torch_npu has no kernel for is an error there, unless ``host_round_trips.md`` lists it: then it has
    one for the simulation.

    Args:
        folder: an empty one, which must exist as long as the process.
        devices: how many NPUs there are.
    """
    wheel, compiler = tools.torch_npu_folder(), tools.c_compiler()
    assert compiler is not None
    distribution = folder / "recfx_simulated_npu-0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: recfx_simulated_npu\nVersion: 0\n")
    (distribution / "entry_points.txt").write_text(ENTRY_POINT)
    libraries = folder / "libraries"
    libraries.mkdir()
    stand_in.build(libraries, wheel, compiler)
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    inherited.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    paths = {"PYTHONPATH": [tools.ROOT, folder, wheel], "LD_LIBRARY_PATH": [libraries]}
    for name, first in paths.items():
        inherited[name] = os.pathsep.join([*map(str, first), *filter(None, [os.environ.get(name)])])
    return {
        **inherited,
        "RECFX_SIMULATED_NPUS": str(devices),
        "ASCEND_LAUNCH_BLOCKING": "1",  # an error is raised by the call that caused it
        "OMP_NUM_THREADS": "1",
        NO_FALLBACK: "1",
        FALLBACKS: " ".join(round_trips.fallbacks()),
    }


def with_fallback(given: dict[str, str]) -> dict[str, str]:
    """The same, but torch_npu runs every operator that it has no kernel for on the host, and warns."""
    return {key: value for key, value in given.items() if key not in (NO_FALLBACK, FALLBACKS)}
