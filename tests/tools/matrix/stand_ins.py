"""Stand-ins for the CUDA libraries that torch's wheels for Linux ask for: gigabytes that tests on a CPU do not use.

Each library has the symbols that torch takes from it, under the versions that it asks for, and every function fails.
"""

import re
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

_CUDA = re.compile(r"_*(cu|nccl|nvrtc|nv|cupti|nvshmem)")


def stand_in(folder: Path) -> list[str]:
    """Put a stand-in for each library that is missing into the folder of torch's own libraries; their names."""
    libraries = sorted(folder.glob("*.so*"))
    here = {path.name for path in libraries} | set(re.findall(r"^\t(\S+) ", _run("ldconfig", "-p"), re.MULTILINE))
    needed: set[str] = set()
    versions: dict[str, set[str]] = defaultdict(set)
    taken: set[str] = set()
    given: set[str] = set()
    for path in libraries:
        needed |= set(re.findall(r"NEEDED.*\[(.*)\]", _run("readelf", "-dW", str(path))))
        library = ""
        for line in _run("readelf", "-VW", str(path)).splitlines():
            if match := re.search(r"File: (\S+)", line):
                library = match[1]
            elif library and (match := re.search(r"Name: (\S+)\s+Flags", line)):
                versions[library].add(match[1])
        for kind, symbol in re.findall(r"^[ 0-9a-f]{16} (\w) (\S+)$", _run("nm", "-D", str(path)), re.MULTILINE):
            (taken if kind == "U" else given).add(symbol)
    given = {symbol.split("@")[0] for symbol in given}
    unversioned = sorted(name for name in taken - given if "@" not in name and _CUDA.match(name))
    for library in sorted(needed - here):
        by_version = {
            version: sorted(name.split("@")[0] for name in taken if name.endswith(f"@{version}"))
            for version in sorted(versions[library])
        }
        _compile(folder / library, by_version, unversioned)
    return sorted(needed - here)


def _compile(path: Path, by_version: dict[str, list[str]], unversioned: list[str]) -> None:
    names = sorted({*unversioned, *(name for names in by_version.values() for name in names)})
    with tempfile.TemporaryDirectory() as build:
        source, script = Path(build, "stand_in.c"), Path(build, "stand_in.map")
        source.write_text("".join(f"long {name}(void) {{ return 100; }}\n" for name in names) + "int stand_in;\n")
        script.write_text(
            "".join(f"{version} {{ global: {' '.join(f'{n};' for n in of)} }};\n" for version, of in by_version.items())
        )
        options = [f"-Wl,--version-script={script}"] if by_version else []
        _run(
            "gcc",
            "-shared",
            "-fPIC",
            "-fno-builtin",
            "-w",
            f"-Wl,-soname,{path.name}",
            *options,
            "-o",
            str(path),
            str(source),
        )


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
