"""What `make wheel` puts into a wheel, as far as it takes no compiling of recfx and no network."""

import csv
import re
import subprocess
import sys
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from types import ModuleType

import pytest

from recfx.kernels.build.compiler import find_compiler

WHEEL = Path(__file__).resolve().parents[1] / ".packaging/wheel"
SOURCE = """
#include <memory>
#include <mutex>
#include <sstream>
std::once_flag flag;
std::string text(int number) {
  std::ostringstream stream;
  stream << number;
  return stream.str();
}
std::shared_ptr<int> copied(const std::shared_ptr<int>& from) {
  std::call_once(flag, [] {});
  return from;
}
"""


@pytest.fixture
def make_wheel(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(WHEEL)
    import make_wheel

    yield make_wheel
    del sys.modules["make_wheel"], sys.modules["torch_headers"]


def test_a_packed_wheel_lists_what_it_holds(make_wheel: ModuleType, tmp_path: Path) -> None:
    content, info = tmp_path / "content", tmp_path / "content" / "recfx-1.0.dist-info"
    library = content / make_wheel.INSIDE / "librecfx.so"
    for folder in (library.parent, info):
        folder.mkdir(parents=True)
    library.write_bytes(b"a library")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    (info / "RECORD").write_text("what was there before\n")
    packed = [tmp_path / name for name in ("one.whl", "two.whl")]
    for path in packed:
        make_wheel.pack(content, "manylinux_2_28_x86_64", path)
    assert packed[0].read_bytes() == packed[1].read_bytes()
    with zipfile.ZipFile(packed[0]) as wheel:
        tags = wheel.read("recfx-1.0.dist-info/WHEEL").decode()
        assert tags.endswith("Root-Is-Purelib: false\nTag: py3-none-manylinux_2_28_x86_64\n")
        assert wheel.getinfo("recfx/kernels/build/libraries/librecfx.so").external_attr >> 16 == 0o100755
        listed = {
            name: (digest, size)
            for name, digest, size in csv.reader(wheel.read("recfx-1.0.dist-info/RECORD").decode().splitlines())
        }
        assert listed.pop("recfx-1.0.dist-info/RECORD") == ("", "")
        files = {name: wheel.read(name) for name in wheel.namelist() if not name.endswith("RECORD")}
    assert listed == {
        name: (f"sha256={urlsafe_b64encode(sha256(text).digest()).rstrip(b'=').decode()}", str(len(text)))
        for name, text in files.items()
    }


def test_what_is_compiled_for_a_wheel_needs_no_newer_system_than_it_says(tmp_path: Path) -> None:
    (tmp_path / "one.cpp").write_text(SOURCE)
    include = ["-include", str(WHEEL / "glibc_2_28.h")]
    command = [*find_compiler(), "-std=c++20", "-Os", "-shared", "-fPIC", *include, "one.cpp", "-o", "one.so"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    symbols = subprocess.run(
        ["readelf", "--version-info", "one.so"], cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60
    ).stdout
    assert max(int(minor) for minor in re.findall(r"GLIBC_2\.(\d+)", symbols)) <= 28
    assert max(int(patch) for patch in re.findall(r"GLIBCXX_3\.4\.(\d+)", symbols)) <= 24
