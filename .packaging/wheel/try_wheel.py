"""``make wheel-test``: installs the wheel of ``dist`` beside each of several torches, and uses it without a compiler.

``try_wheel.py PYTHON...``: each is the Python of an environment with torch, TorchRec and FBGEMM. A new environment sees
that one's packages; pip installs the wheel into it and must leave them alone; what then runs finds no compiler on its
path, no files in its home, and no checkout of recfx.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = "import sysconfig; print(sysconfig.get_path('purelib'))"


def main(*pythons: str) -> None:
    """Exits with what went wrong, or prints where each library was."""
    if not pythons:
        sys.exit('name one Python or several of environments: make wheel-test WITH="one/bin/python another/bin/python"')
    wheels = (ROOT / "dist").glob(f"recfx-*_{platform.machine()}.whl")
    wheel = max(wheels, key=lambda path: path.stat().st_mtime, default=None)
    if wheel is None:
        sys.exit("there is no wheel for this machine in dist: make wheel")
    for python in pythons:
        with tempfile.TemporaryDirectory() as folder:
            _try(wheel, python, Path(folder))


def _try(wheel: Path, python: str, folder: Path) -> None:
    _run([python, "-m", "venv", folder / "new"])
    new = folder / "new" / "bin" / "python"
    below = _run([python, "-c", _PACKAGES]).strip()
    Path(_run([new, "-c", _PACKAGES]).strip(), "below.pth").write_text(f"{below}\n")
    before = _run([new, "-m", "pip", "freeze", "--path", below])
    _run([new, "-m", "pip", "install", "--disable-pip-version-check", "-q", "--no-warn-conflicts", wheel])
    if _run([new, "-m", "pip", "freeze", "--path", below]) != before:
        sys.exit(f"installing the wheel changed {below}")
    shutil.copytree(ROOT / "examples", folder, dirs_exist_ok=True)
    shutil.copy(Path(__file__).with_name("round.py"), folder)
    home = folder / "home"
    home.mkdir()
    clean = {"PATH": str(new.parent), "HOME": str(home), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
    loaded = _run([new, "round.py"], cwd=folder, env=clean).splitlines()[-1]
    if str(folder) not in loaded or list(home.rglob("*.so")):
        sys.exit(f"the library is not that of the wheel: {loaded}")
    _run([new, "train_dlrm.py", "--quick"], cwd=folder, env=clean)
    _run([new.with_name("recfx"), "--version"], cwd=folder, env=clean)
    print(f"torch {loaded.split()[0]}: converted, trained, exported, served; the demo ran", flush=True)


def _run(command: list[str | Path], cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=env)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main(*sys.argv[1:])
