"""A recorded log leads the batch state to its own digests, and the first step that does not fit is named."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from maniple.v1.delta_log_pb2 import DeltaLogEntry
from maniple.v1.scheduler_delta_pb2 import BlockIds, SchedulerDelta
from maniple.v1.worker_pb2 import GroupLimits
from service_chassis.protocol.delta_recording import FIRST_LINE, framed
from support.scripted_reference import greedy, seeded
from support.worker_process import DeltaMaker
from worker_service.batch_rows import BatchLimits
from worker_service.batch_state import BatchState
from worker_service.replay import DIFFERS, OK, USAGE, main, read_entries, replay

VECTORS = Path(__file__).parent / "vectors"
LOG = VECTORS / "recorded_deltas.log"


@pytest.fixture
def entries() -> list[DeltaLogEntry]:
    with LOG.open("rb") as file:
        return list(read_entries(file))


def deltas(entries: list[DeltaLogEntry]) -> list[SchedulerDelta]:
    return [SchedulerDelta.FromString(one.delta) for one in entries if one.HasField("delta")]


def changed(entries: list[DeltaLogEntry], step: int, change: Callable[[SchedulerDelta], object]) -> list[DeltaLogEntry]:
    """Return the log with the delta of one step changed."""
    made = []
    for entry in entries:
        copy = DeltaLogEntry()
        copy.CopyFrom(entry)
        if entry.HasField("delta") and (delta := SchedulerDelta.FromString(entry.delta)).step == step:
            change(delta)
            copy.delta = delta.SerializeToString()
        made.append(copy)
    return made


def difference(entries: list[DeltaLogEntry]) -> str:
    (tenure,) = replay(entries)
    return tenure.difference


def test_recorded_vector_leads_to_its_digests(entries: list[DeltaLogEntry], capsys: pytest.CaptureFixture[str]) -> None:
    all_deltas = deltas(entries)
    # The vector is worth something only if it has what a batch state must get right.
    assert any(delta.preempted for delta in all_deltas)
    assert any(delta.block_copies for delta in all_deltas)
    assert any(delta.mode == SchedulerDelta.MODE_APPLY_ONLY for delta in all_deltas)
    new = [one for delta in all_deltas for one in delta.new_requests]
    assert any(one.HasField("fork_of") for one in new)
    assert any(one.num_computed_tokens and not one.HasField("fork_of") for one in new)
    (tenure,) = replay(entries)
    assert tenure.difference == ""
    assert tenure.last_step == len(all_deltas) == all_deltas[-1].step
    assert tenure.num_results == tenure.num_token_digests == sum(one.HasField("result") for one in entries)
    assert main([str(LOG)]) == OK
    assert f"steps 1 to {tenure.last_step}: every state digest equal" in capsys.readouterr().out


def test_recorded_tokens_are_those_of_the_models_definition(entries: list[DeltaLogEntry]) -> None:
    """The results in the vector are no mere echo: row by row they are what the scripted model must say."""
    spec = importlib.util.spec_from_file_location("record", VECTORS / "record.py")
    assert spec is not None
    assert spec.loader is not None
    record = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(record)
    formation = entries[0].formation
    limits = {name: getattr(formation.limits, name) for name in (*record.LIMITS, "num_blocks") if name[:7] != "num_kv_"}
    state = BatchState(BatchLimits(**limits, vocab_size=formation.vocab_size))
    outputs: dict[tuple[str, int], list[int]] = {}
    names: dict[int, tuple[str, int]] = {}
    works = {}
    for entry in entries:
        if entry.HasField("delta"):
            work = state.apply(entry.delta)
            names |= {new.req_index: (new.request_id, new.sample_index) for new in work.new_rows}
            works[work.step] = [names[row] for row in work.rows[work.samples].tolist()]
        elif entry.HasField("result"):
            for name, token_id in zip(works[entry.result.step], entry.result.token_ids, strict=True):
                outputs.setdefault(name, []).append(token_id)
    expected = {}
    for one in record.requests():
        sampling, prompt = one.sampling, list(one.prompt_token_ids)
        for index in range(sampling.n):
            expected[one.request_id, index] = (
                seeded(prompt, sampling.max_tokens, sampling.seed, index, sampling.temperature)
                if sampling.temperature
                else greedy(prompt, sampling.max_tokens)
            )
    assert outputs == expected


def test_first_wrong_step_is_named(entries: list[DeltaLogEntry]) -> None:
    def appended(delta: SchedulerDelta) -> list[BlockIds]:
        return [block.append for change in delta.changes for block in change.blocks if block.HasField("append")]

    def flip(delta: SchedulerDelta) -> None:
        ids = appended(delta)[0].ids
        ids[0] = ids[0] % 13 + 1

    first_append = next(delta.step for delta in deltas(entries) if appended(delta))

    assert difference(changed(entries, first_append, flip)).startswith(f"step {first_append}: state_digest=")
    assert "diverged" in difference(changed(entries, first_append, flip))
    spoiled = changed(entries, 9, lambda delta: delta.preempted.append(77))
    assert difference(spoiled).startswith("step 9: ")
    lost = [
        entry for entry in entries if not entry.HasField("delta") or SchedulerDelta.FromString(entry.delta).step != 9
    ]
    assert difference(lost) == "step 10 came, 9 is due"


def test_wrong_and_missing_results_are_named(entries: list[DeltaLogEntry]) -> None:
    def results(change: Callable[[DeltaLogEntry], bool]) -> list[DeltaLogEntry]:
        made = []
        for entry in entries:
            copy = DeltaLogEntry()
            copy.CopyFrom(entry)
            if not (entry.HasField("result") and entry.result.step == 7) or change(copy):
                made.append(copy)
        return made

    def other_token(entry: DeltaLogEntry) -> bool:
        entry.result.token_ids[0] ^= 1
        return True

    assert difference(results(other_token)).startswith("step 7: the token digest was 0x")
    assert difference(results(lambda entry: bool(entry.result.token_ids.pop()))).startswith("step 7: the result does")
    assert difference(results(lambda entry: False)) in (
        "step 7: its result is missing",
        "step 8: the result does not fit the step",
    )


def test_log_of_several_owners_and_groups_is_read_as_a_whole(entries: list[DeltaLogEntry]) -> None:
    at = next(
        index
        for index, entry in enumerate(entries)
        if entry.HasField("delta") and SchedulerDelta.FromString(entry.delta).step == 20
    )
    taken_over = DeltaLogEntry(group="0")
    taken_over.formation.CopyFrom(entries[0].formation)
    taken_over.formation.epoch = 2
    taken_over.formation.first_step = 20
    # Results of the first owner's last steps are nobody's any more.
    rest = [entry for entry in entries[at:] if entry.HasField("delta")]
    first, second = replay([*entries[:at], taken_over, *rest])
    assert (first.last_step, first.difference) == (19, "")
    assert (second.last_step, second.difference) == (deltas(entries)[-1].step, "")
    # A log that begins at the takeover lacks the batch, and says so.
    (alone,) = replay([taken_over, *rest])
    assert alone.difference.endswith("(the batch that this owner took over is not in this log)")
    other = []
    for entry in entries:
        copy = DeltaLogEntry()
        copy.CopyFrom(entry)
        copy.group = "1"
        other.append(copy)
    mixed = [entry for pair in zip(entries, other, strict=True) for entry in pair]
    assert [(tenure.group, tenure.difference) for tenure in replay(mixed)] == [("0", ""), ("1", "")]


def test_rows_whose_masks_died_come_back_with_what_a_later_owner_says() -> None:
    maker = DeltaMaker()
    limits = GroupLimits(
        max_num_seqs=5, max_num_batched_tokens=64, max_model_len=200, block_size=4, num_blocks=99, max_steps_in_flight=2
    )

    def formed(first_step: int) -> DeltaLogEntry:
        formation = DeltaLogEntry.Formation(
            formation_id="f", first_step=first_step, limits=limits, vocab_size=260, num_kv_groups=1, world_size=1
        )
        return DeltaLogEntry(group="0", formation=formation)

    def sent(**what: Any) -> DeltaLogEntry:
        return DeltaLogEntry(group="0", delta=maker.make(**what))

    log = [formed(1), sent(new={0: [1, 2, 3], 1: [4]}, awaits_mask=[0]), sent(awaits_mask=[0]), sent(awaits_mask=[0])]
    # Of the three steps under masks only the first was given one.
    resumed = sent(resumed={0: 4}, awaits_mask=[0])
    assert [one.difference for one in replay([*log, formed(4), resumed, sent()])] == ["", ""]
    # Within one tenure nobody may know less than before, and what no mask was for never.
    assert "must be the 6 tokens it knows" in difference([*log, resumed])
    maker = DeltaMaker()
    log = [formed(1), sent(new={0: [1, 2, 3]}), sent(), formed(3), sent(resumed={0: 4})]
    assert "must be the 5 tokens it knows" in replay(log)[1].difference


def test_command_says_what_a_file_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("hello\n")
    (tmp_path / "damaged").write_bytes(FIRST_LINE + framed(b"\xff\xff\xff"))
    (tmp_path / "flipped").write_bytes(LOG.read_bytes().replace(b"greedy", b"grebdy"))
    assert main([str(tmp_path / "text")]) == USAGE
    assert main([str(tmp_path / "damaged")]) == USAGE
    assert main([str(tmp_path / "absent")]) == USAGE
    told = capsys.readouterr().err
    for words in ("does not begin with the line", "record 0 is no entry", "No such file"):
        assert words in told
    # A name is no part of any digest; a digest itself is.
    assert main([str(tmp_path / "flipped")]) == OK
    with LOG.open("rb") as file:
        entries = list(read_entries(file))
    spoiled = changed(entries, 5, lambda delta: setattr(delta, "state_digest", delta.state_digest ^ 1))
    records = b"".join(framed(entry.SerializeToString()) for entry in spoiled)
    (tmp_path / "spoiled").write_bytes(FIRST_LINE + records)
    assert main([str(tmp_path / "spoiled")]) == DIFFERS
    assert ": step 5: state_digest=" in capsys.readouterr().out
