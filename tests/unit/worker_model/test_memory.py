"""What KV may take, from readings that nobody has to measure."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from worker_service import memory
from worker_service.kv_cache import KvCache, KvCacheSpec
from worker_service.memory import KvDemand, plan_memory
from worker_service.platforms import cpu
from worker_service.platforms.base import GIB, MemoryReading
from worker_service.platforms.cpu import CpuPlatform

DEMAND = KvDemand(block_bytes=1 << 20, block_size=16, max_num_seqs=3, max_model_len=100)


def reading(total: int, available: int, own: int = GIB) -> MemoryReading:
    return MemoryReading(total=total, available=available, own=own)


@pytest.mark.parametrize(
    ("before", "base", "utilization", "needed", "budget"),
    [
        (reading(64 * GIB, 60 * GIB), GIB, 0.9, 100 * GIB, 4 * GIB),  # nobody asked for more
        (reading(64 * GIB, 6 * GIB), GIB, 0.9, 100 * GIB, 3 * GIB),  # half of what is free
        (reading(64 * GIB, 6 * GIB), 3 * GIB, 0.9, 100 * GIB, 2 * GIB),  # the step itself will take two
        (reading(10 * GIB, 9 * GIB), GIB, 0.5, 100 * GIB, 2 * GIB),  # half of the share that is left
        (reading(64 * GIB, 60 * GIB), GIB, 0.9, GIB, GIB),  # more is of no use
        (reading(2 * GIB, 0), GIB, 0.9, GIB, 0),
    ],
)
def test_kv_on_a_cpu(before: MemoryReading, base: int, utilization: float, needed: int, budget: int) -> None:
    assert CpuPlatform(1).kv_budget(before, base, utilization, needed) == budget


def test_ranks_and_groups_on_one_machine_take_their_part_each() -> None:
    before, needed = reading(64 * GIB, 7 * GIB), 100 * GIB
    third = CpuPlatform(1, num_groups_sharing=3)
    assert third.kv_budget(before, GIB, 0.9, needed) == (7 << 29) // 3
    third.share(2)
    assert third.kv_budget(before, GIB, 0.9, needed) == (7 << 29) // 6
    # Who asks for a size may have all that is there; ranks of one group take theirs at the same time.
    assert third.free_for_kv(before, 3 * GIB) == 5 * GIB // 2
    assert third.free_for_kv(reading(64 * GIB, GIB), 3 * GIB) == 0


def test_demand_lets_every_row_grow_to_its_longest() -> None:
    assert DEMAND.needed_bytes == (3 * 7 + 1) << 20


def test_facts_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[tuple[str, dict[str, object]]] = []

    class Log:
        def info(self, event: str, **facts: object) -> None:
            lines.append((event, facts))

    monkeypatch.setattr(memory, "get_logger", Log)
    facts = plan_memory(
        CpuPlatform(1),
        before=reading(16 * GIB, 8 * GIB, own=2 * GIB),
        peak_bytes=3 * GIB,
        weight_bytes=GIB,
        utilization=0.9,
        demand=DEMAND,
        step_us_per_token=5.0,
    )
    assert (facts.base_bytes, facts.activation_bytes, facts.foreign_bytes) == (3 * GIB, GIB, 6 * GIB)
    assert facts.kv_bytes == DEMAND.needed_bytes
    assert facts.free_bytes == 7 * GIB
    [(event, said)] = lines
    assert event == "memory.profiled"
    assert said["kv_blocks"] == 22
    assert said["kv_tokens"] == 352
    assert said["total_gib"] == 16


def test_the_tightest_control_group_counts_without_its_page_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/a/b\n0::/a/b\n",
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "3000",
        "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "1000",
        "sys/fs/cgroup/memory/a/memory.stat": "cache 900\ntotal_inactive_file 400\n",
        "sys/fs/cgroup/a/b/memory.max": "max",
        "sys/fs/cgroup/a/b/memory.current": "70",
        "sys/fs/cgroup/memory.max": "2000",
        "sys/fs/cgroup/memory.current": "500",
        "sys/fs/cgroup/memory.stat": "inactive_file 100\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(cpu, "Path", lambda text: tmp_path / text.lstrip("/"))
    assert sorted(cpu._control_group_limits()) == [(2000, 400), (3000, 600)]


def test_unused_blocks_are_zeros_and_copies_read_before_they_write() -> None:
    spec = KvCacheSpec(num_layers=2, num_kv_heads=3, head_dim=8, block_size=16, dtype=torch.bfloat16)
    cache = KvCache(spec, 5, torch.device("cpu"))
    assert cache.num_bytes == 5 * spec.block_bytes == 2 * 5 * 2 * 3 * 8 * 16 * 2
    for keys, values in cache.layers:
        assert not keys.any()
        assert not values.any()
        for block in range(5):
            keys[block] = block
            values[block] = 10 + block
    cache.copy_blocks([(0, 1, 2), (0, 2, 3), (0, 3, 1)])
    for keys, values in cache.layers:
        assert [int(keys[block].float().mean()) for block in range(5)] == [0, 3, 1, 2, 4]
        assert [int(values[block].float().mean()) for block in range(5)] == [10, 13, 11, 12, 14]
