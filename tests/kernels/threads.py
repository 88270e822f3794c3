"""What torch's number of threads must not change."""

from collections.abc import Callable, Sequence

import torch


def assert_same_on_any_threads(
    run: Callable[[], Sequence[torch.Tensor]], counts: Sequence[int] = (1, 2, 4)
) -> Sequence[torch.Tensor]:
    """Run it with each number of threads: the tensors are equal bit for bit. Returns those of the first run.

    The next test of this folder begins with two threads again (``conftest.py``).
    """
    results = []
    for count in counts:
        torch.set_num_threads(count)
        results.append(run())
    for other in results[1:]:
        for one, tensor in zip(results[0], other, strict=True):
            assert torch.equal(one, tensor)
    return results[0]
