import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recfx.kernels import library
from recfx.kernels.id_range import first_out_of_range, first_out_of_range_reference


def plain(values: list[int], offsets: list[int], rows: list[int]) -> int:
    for key, limit in enumerate(rows):
        for position in range(offsets[key], offsets[key + 1]):
            if limit >= 0 and not 0 <= values[position] < limit:
                return position
    return -1


@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    before=st.integers(0, 2),
    after=st.integers(0, 2),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    data=st.data(),
)
def test_equals_a_plain_loop(
    lengths: list[int], before: int, after: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    assert library.load(), library.why_not()
    info = torch.iinfo(dtype)
    offsets = [before]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    count = offsets[-1] + after
    id_ = st.one_of(st.integers(-1, 5), st.sampled_from([info.min, info.max]), st.integers(0, 2))
    values = data.draw(st.lists(id_, min_size=count, max_size=count))
    limit = st.sampled_from([-1, 0, 3, 4, 2**31, 2**63 - 1])
    rows = data.draw(st.lists(limit, min_size=len(lengths), max_size=len(lengths)))
    arguments = (torch.tensor(values, dtype=dtype), torch.tensor(offsets), torch.tensor(rows))
    expected = plain(values, offsets, rows)
    assert first_out_of_range(*arguments) == expected
    assert int(first_out_of_range_reference(*arguments)) == expected


@pytest.mark.parametrize("bad", [0, 511, 512, 99_999, 131_072, 199_999])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_first_of_many_across_threads(bad: int, dtype: torch.dtype) -> None:
    values = torch.randint(0, 100, (200_000,), dtype=dtype)
    offsets = torch.tensor([0, 50_000, 50_000, 131_072, 200_000])
    rows = torch.full((4,), 100)
    assert first_out_of_range(values, offsets, rows) == -1
    values[bad] = 100
    values[-1] = -1
    assert first_out_of_range(values, offsets, rows) == bad
    assert int(first_out_of_range_reference(values, offsets, rows)) == bad


@pytest.mark.parametrize("offsets", [[0, 3, 2], [-1, 1, 2], [0, 1, 4]])
@pytest.mark.parametrize("with_library", [True, False])
def test_bad_offsets(monkeypatch: pytest.MonkeyPatch, offsets: list[int], with_library: bool) -> None:
    if not with_library:
        monkeypatch.setattr(library, "load", lambda: False)
    with pytest.raises(RuntimeError, match="must ascend within"):
        first_out_of_range(torch.zeros(3, dtype=torch.int64), torch.tensor(offsets), torch.tensor([1, 1]))


def test_opcheck_and_script() -> None:
    assert library.load(), library.why_not()
    arguments = (torch.tensor([1, 2, 9]), torch.tensor([0, 1, 3]), torch.tensor([5, 5]))
    torch.library.opcheck(torch.ops.recfx.first_out_of_range.default, arguments)

    @torch.jit.script
    def use(values: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor) -> int:
        return int(torch.ops.recfx.first_out_of_range(values, offsets, rows))

    assert use(*arguments) == 2
    assert int(torch.jit.script(first_out_of_range_reference)(*arguments)) == 2
