"""``make aarch64``: the C++ library for aarch64 in qemu's emulation of a process, against what it computes here.

    python -m tests.kernels.emulated [WHEEL]

The library is that of a wheel for aarch64, or is compiled now. Each recorded call of an operator must have the same
bits there, and the programs that stress index and steps must end well. Emulated are instructions; not emulated are
their time, and the weak order of memory: what one thread writes, others see in the order of an x86-64. Needs
``aarch64-linux-gnu-g++``, ``qemu-aarch64-static``, and ``apt-get`` with Debian's keys for a Python; that Python and
torch are kept in ``build/aarch64``.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from recfx.kernels.build.compiler import COMPILE_FLAGS, compile_library, torch_flags
from recfx.kernels.build.library import SOURCES
from tests.kernels import repeat_calls
from tests.kernels.recorded_calls import record

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build" / "aarch64"
TORCH = "2.10.0"  # the newest whose package for aarch64 needs no CUDA
PACKAGES = [f"torch=={TORCH}", "filelock", "fsspec", "jinja2", "MarkupSafe", "mpmath", "networkx", "numpy<2.3"]
PACKAGES += ["sympy", "typing_extensions"]
COMPILER = "aarch64-linux-gnu-g++"
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
DEBIAN = f"deb [arch=arm64 signed-by={KEYS}] http://deb.debian.org/debian bookworm main"
# Torch asks the system for the processor; the emulator would let it read that of this machine.
PROCESSOR = """\
processor\t: {number}
Features\t: fp asimd aes pmull sha1 sha2 crc32 atomics fphp asimdhp asimdrdm asimddp
CPU implementer\t: 0x48
CPU architecture: 8
CPU variant\t: 0x1
CPU part\t: 0xd01
CPU revision\t: 0

"""


def system() -> Path:
    """A folder with the root of a Debian for aarch64, as far as Python 3.11 needs it."""
    root = KEPT / "root"
    if not root.is_dir():
        state = KEPT / "apt"
        for folder in ("lists/partial", "cache/archives/partial"):
            (state / folder).mkdir(parents=True, exist_ok=True)
        (state / "status").touch()
        (state / "sources.list").write_text(f"{DEBIAN}\n")
        settings = {
            "APT::Architecture": "arm64", "APT::Architectures::": "arm64", "Dir::State": state,
            "Dir::State::status": state / "status", "Dir::Cache": state / "cache", "Dir::Etc::sourceparts": "/dev/null",
            "Dir::Etc::sourcelist": state / "sources.list",
        }  # fmt: skip
        apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
        subprocess.run([*apt, "update"], check=True)
        what = ["python3.11", "libgomp1", "libstdc++6"]
        subprocess.run([*apt, "install", "-y", "--download-only", "--no-install-recommends", *what], check=True)
        made = KEPT / "new-root"
        for package in (state / "cache" / "archives").glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, made], check=True)
        (made / "proc").mkdir(exist_ok=True)
        (made / "proc" / "cpuinfo").write_text("".join(PROCESSOR.format(number=number) for number in range(2)))
        made.rename(root)
    return root


def torch_for_it() -> Path:
    """A folder with torch, and what it imports."""
    folder = KEPT / f"torch-{TORCH}"
    if not folder.is_dir():
        which = ["--no-deps", "--only-binary=:all:", "--python-version=3.11", "--implementation=cp"]
        which += [f"--platform=manylinux_2_{glibc}_aarch64" for glibc in (28, 27, 17)]
        made = folder.with_name("new-torch")
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, *which, "--target", made, *PACKAGES], check=True)
        made.rename(folder)
    return folder


def emulator(root: Path, torch: Path) -> list[str]:
    """The command before a program for aarch64: on a core like those of Kunpeng 920, without SVE."""
    variables = {"LD_LIBRARY_PATH": torch / "torch" / "lib", "PYTHONPATH": torch, "PYTHONHOME": "/usr"}
    passed_on = [word for name, value in variables.items() for word in ("-E", f"{name}={value}")]
    return ["qemu-aarch64-static", "-cpu", "neoverse-n1", "-L", str(root), *passed_on]


def library_for(torch: Path, wheel: str | None, scratch: Path) -> Path:
    """The library that serves that torch."""
    if wheel is None:
        links = [f"-L{torch / 'torch' / 'lib'}"]
        return compile_library([COMPILER], SOURCES, scratch, torch_flags(torch / "torch", cxx11_abi=True), links)
    with zipfile.ZipFile(wheel) as archive:
        minor = TORCH.rpartition(".")[0]
        (name,) = (name for name in archive.namelist() if f"librecfx-torch{minor}-" in name)
        return Path(archive.extract(name, scratch))


def main(wheel: str | None = None) -> int:
    """Prints what ran; the number of programs that did not end well."""
    root, torch = system(), torch_for_it()
    emulated = emulator(root, torch)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        record(scratch / "calls.pt", 100)
        python = [*emulated, root / "usr" / "bin" / "python3.11"]
        library = library_for(torch, wheel, scratch)
        programs: list[list[str | Path]] = [[*python, repeat_calls.__file__, library, scratch / "calls.pt"]]
        for name in ("index_stress", "step_stress"):
            source = Path(__file__).with_name(f"{name}.cpp")
            flags = [*COMPILE_FLAGS, "-pthread", f"-I{SOURCES}"]
            subprocess.run([COMPILER, *flags, source, "-o", scratch / name], check=True)
            programs.append([*emulated, scratch / name, *(["8"] if name == "step_stress" else [])])
        failed = [program for program in programs if subprocess.run(program, check=False).returncode != 0]
    for program in failed:
        print(f"failed: {program}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
