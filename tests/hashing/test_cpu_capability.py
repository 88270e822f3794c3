import pytest

import recfx
from recfx.hashing.state import CPU_CAPABILITY, check_capability
from recfx.kernels.build import library


def test_vector_instructions_that_are_not_here_are_refused_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    operators = library.operators()
    monkeypatch.setattr(library, "_when_defined", [check_capability])
    monkeypatch.setattr(library, "_loaded", None)
    monkeypatch.setenv(CPU_CAPABILITY, "non\nsense" * 20)
    for _ in range(2):
        with pytest.raises(recfx.RecfxError, match=rf"{CPU_CAPABILITY} is 'non\\nsense.{{,40}}, which") as caught:
            library.load()
        assert caught.value.reason == "unknown_cpu_capability"
        assert caught.value.what_to_do.endswith(f"one of {', '.join(operators.cpu_capabilities())}.")
    for fits in ("", operators.cpu_capabilities()[0]):
        monkeypatch.setenv(CPU_CAPABILITY, fits)
        check_capability()
    assert library.load()
