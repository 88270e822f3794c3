"""Builds the libraries that torch_npu loads instead of CANN's, from the names that the wheel asks for."""

import re
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("stand_in.c")
LIBRARY = "ascendcl"
ALIASES = ("hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "atb")
"""Libraries that only have to exist: they depend on the one that holds every function."""

# CANN's C functions begin so. Anything shorter than rtX would also cover functions of other libraries.
_OF_CANN = re.compile(r"(acl|Hccl|Msprof|rt[DFGK])")
# Looked up by name when they are first used, so that they are not among the undefined symbols of the wheel.
_LOOKED_UP = (
    "aclSetCompileopt",
    "aclrtCtxSetSysParamOpt",
    "aclrtDestroyStreamForce",
    "aclrtSetDeviceSatMode",
    "aclrtSetOpExecuteTimeOut",
    "aclrtSetSysParamOpt",
    "aclrtSynchronizeDeviceWithTimeout",
    "aclrtSynchronizeStreamWithTimeout",
)


def build(folder: Path, wheel: Path, compiler: str) -> Path:
    """Compile the libraries.

    Args:
        folder: where they are put.
        wheel: the folder that holds the package ``torch_npu``.
        compiler: a C compiler.

    Returns:
        ``folder``, which goes into ``LD_LIBRARY_PATH``.
    """
    written = SOURCE.read_text()
    defined = set(re.findall(r"^[a-z][\w *]*?\b(\w+)\(", written, re.MULTILINE))
    further = sorted((_undefined(wheel / "torch_npu") | set(_LOOKED_UP)) - defined)
    succeed = "".join(f"int {name}(void) {{ return 0; }}\n" for name in further)
    _compile(compiler, folder / f"lib{LIBRARY}.so", written + "\n/* Success, and nothing else. */\n" + succeed)
    for alias in ALIASES:
        _compile(compiler, folder / f"lib{alias}.so", f"int recfx_stands_in_for_{alias};\n", folder)
    return folder


def _undefined(package: Path) -> set[str]:
    """The functions of CANN that the libraries of the wheel leave undefined."""
    libraries = [str(path) for path in (*package.glob("_C*.so"), *package.glob("lib/*.so"))]
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", *libraries], capture_output=True, text=True, check=True
    ).stdout
    names = {line.split()[-1].split("@")[0] for line in listed.splitlines() if " U " in f" {line} "}
    return {name for name in names if _OF_CANN.match(name)}


def _compile(compiler: str, library: Path, source: str, needs: Path | None = None) -> None:
    linked = [] if needs is None else [f"-L{needs}", "-Wl,--no-as-needed", f"-l{LIBRARY}", "-Wl,-rpath,$ORIGIN"]
    command = [compiler, "-shared", "-fPIC", "-O1", "-std=c11", "-D_GNU_SOURCE", f"-Wl,-soname,{library.name}"]
    subprocess.run(
        [*command, "-x", "c", "-", "-x", "none", *linked, "-o", str(library)], input=source, text=True, check=True
    )
