"""How many bytes of tensors are alive at once while something runs? By the allocator's count."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_live_bytes(work: Callable[[], object]) -> int:
    """The largest sum of what `work` has allocated on the CPU and not yet freed.

    Everything that goes through PyTorch's allocator counts, also inside an operation; what was
    there before does not.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = work()
    del result
    assert recorded.profiler is not None
    events = recorded.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    live = peak = 0
    for _, num_bytes in sorted(changes, key=lambda change: change[0]):
        live += num_bytes
        peak = max(peak, live)
    return peak
