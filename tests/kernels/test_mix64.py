import torch
from hypothesis import given
from hypothesis import strategies as st

from recfx.kernels.index.mix64 import mix64, mix64_integer, mixed_modulo, shifted_by_floats, shifted_right, to_int64

INT64 = st.integers(-(2**63), 2**63 - 1)


def plain_splitmix(value: int) -> int:
    z = value % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_published_vectors() -> None:
    # The first outputs of splitmix64 seeded with 1234567 (the state advances by the golden ratio before each).
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    states = [1234567 + k * 0x9E3779B97F4A7C15 for k in (1, 2, 3)]
    got = mix64(torch.tensor([to_int64(state) for state in states]))
    assert [value % 2**64 for value in got.tolist()] == expected


@given(st.lists(INT64, min_size=1, max_size=20), INT64)
def test_tensors_equal_unsigned_integers(ids: list[int], seed: int) -> None:
    tensor = torch.tensor(ids)
    assert [value % 2**64 for value in mix64(tensor).tolist()] == [plain_splitmix(id_) for id_ in ids]
    seeded = [plain_splitmix(id_ % 2**64 ^ plain_splitmix(seed)) for id_ in ids]
    assert [value % 2**64 for value in mix64(tensor, seed).tolist()] == seeded
    assert mix64_integer(seed) % 2**64 == plain_splitmix(seed)


@given(st.lists(INT64, min_size=1, max_size=20), st.integers(1, 2**40), INT64)
def test_modulo_clears_the_sign_first(ids: list[int], pieces: int, seed: int) -> None:
    expected = [plain_splitmix(id_ % 2**64 ^ plain_splitmix(seed)) % 2**63 % pieces for id_ in ids]
    assert mixed_modulo(torch.tensor(ids), pieces, seed).tolist() == expected


@given(st.lists(INT64, min_size=1, max_size=20), st.integers(16, 62))
def test_shifts_with_and_without_floats(numbers: list[int], bits: int) -> None:
    expected = [number % 2**64 >> bits for number in [*numbers, -1, -(2**63), 2**63 - 1]]
    tensor = torch.tensor([*numbers, -1, -(2**63), 2**63 - 1])
    for shifted in (shifted_right, shifted_by_floats):
        assert shifted(tensor, bits).tolist() == expected


def test_scriptable() -> None:
    ids = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63)])
    for seed in (0, -7):
        assert torch.equal(torch.jit.script(mix64)(ids, seed), mix64(ids, seed))
        assert torch.equal(torch.jit.script(mixed_modulo)(ids, 64, seed), mixed_modulo(ids, 64, seed))
    assert torch.equal(torch.jit.script(shifted_by_floats)(ids, 33), shifted_right(ids, 33))
