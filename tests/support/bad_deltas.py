"""Every way in which a delta's content can be wrong: each takes a good delta and spoils it in one place.

A spoiler returns False where the delta and the state before it offer nothing to spoil in its way.
"""

from __future__ import annotations

from collections.abc import Callable

from maniple.v1.scheduler_delta_pb2 import NewRequest, Pooling, SchedulerDelta
from worker_service.batch_state import BatchState, RowFacts, RowState

Spoiler = Callable[[SchedulerDelta, BatchState], bool]
SPOILERS: dict[str, tuple[Spoiler, str]] = {}  # name -> (spoiler, what the refusal says)


def spoils(sentence: str) -> Callable[[Spoiler], Spoiler]:
    def register(spoiler: Spoiler) -> Spoiler:
        SPOILERS[spoiler.__name__] = (spoiler, sentence)
        return spoiler

    return register


def _in(state: BatchState, row_state: RowState, delta: SchedulerDelta) -> int | None:
    """A row in a state, of which the delta says nothing."""
    return next(iter(_all_in(state, row_state, delta)), None)


def _all_in(state: BatchState, row_state: RowState, delta: SchedulerDelta) -> list[int]:
    named = _named(delta)
    return [row for row, facts in state.rows().items() if facts.state is row_state and row not in named]


def _named(delta: SchedulerDelta) -> set[int]:
    named = {f.req_index for f in delta.finished} | set(delta.preempted)
    named |= {c.req_index for c in delta.changes} | {n.req_index for n in delta.new_requests}
    named |= {n.fork_of for n in delta.new_requests if n.HasField("fork_of")}
    return named


def _free(state: BatchState, delta: SchedulerDelta) -> int | None:
    named = {n.req_index for n in delta.new_requests}
    rows = state.rows()
    return next((r for r in range(state.limits.max_num_seqs) if r not in rows and r not in named), None)


def _facts(state: BatchState, row: int) -> RowFacts:
    return state.rows()[row]


def _plain_new(delta: SchedulerDelta) -> NewRequest | None:
    return next((new for new in delta.new_requests if not new.HasField("fork_of")), None)


# --- rows


@spoils("finished.req_index=.*must be live")
def finishes_a_free_row(delta, state):
    row = _free(state, delta)
    if row is None:
        return False
    delta.finished.add(req_index=row)
    return True


@spoils("finished.req_index=.*must be live")
def finishes_a_row_twice(delta, state):
    if not delta.finished:
        return False
    delta.finished.append(delta.finished[0])
    return True


@spoils("finished.num_tokens=.*at most the \\d+ known")
def finishes_with_more_tokens_than_known(delta, state):
    if not delta.finished:
        return False
    delta.finished[0].num_tokens = _facts(state, delta.finished[0].req_index).num_known_tokens + 1
    return True


@spoils("preempted=.*must be live")
def preempts_a_free_row(delta, state):
    row = _free(state, delta)
    if row is None:
        return False
    delta.preempted.append(row)
    return True


@spoils("preempted=.*must have blocks")
def preempts_a_preempted_row(delta, state):
    row = _in(state, RowState.PREEMPTED, delta)
    if row is None:
        return False
    delta.preempted.append(row)
    return True


@spoils("preempted=.*must have blocks")
def preempts_a_row_twice(delta, state):
    row = _in(state, RowState.DECODE, delta)
    if row is None:
        return False
    delta.preempted.extend([row, row])
    return True


@spoils("preempted=.*must be live")
def preempts_a_row_that_finishes(delta, state):
    if not delta.finished:
        return False
    delta.preempted.append(delta.finished[0].req_index)
    return True


@spoils("changes.req_index=.*must be live")
def changes_a_free_row(delta, state):
    row = _free(state, delta)
    if row is None:
        return False
    delta.changes.add(req_index=row, num_scheduled_tokens=1)
    return True


@spoils("changes.req_index=.*must be (live|named once)")
def changes_a_row_that_finishes(delta, state):
    if not delta.finished:
        return False
    delta.changes.add(req_index=delta.finished[0].req_index)
    return True


@spoils("changes.req_index=.*named once")
def changes_a_row_twice(delta, state):
    row = _in(state, RowState.DECODE, delta)
    if row is None:
        return False
    delta.changes.add(req_index=row)
    delta.changes.add(req_index=row)
    return True


@spoils("changes.req_index=.*named once")
def changes_a_row_that_enters(delta, state):
    if not delta.new_requests:
        return False
    delta.changes.add(req_index=delta.new_requests[0].req_index)
    return True


@spoils("new_requests.req_index=.*must be free")
def enters_a_live_row(delta, state):
    row = _in(state, RowState.DECODE, delta)
    if row is None or not delta.new_requests:
        return False
    delta.new_requests[0].req_index = row
    return True


@spoils("new_requests.req_index=.*named once")
def enters_a_row_twice(delta, state):
    if not delta.new_requests:
        return False
    delta.new_requests.append(delta.new_requests[0])
    return True


@spoils("new_requests.req_index=.*below max_num_seqs")
def enters_a_row_out_of_range(delta, state):
    if not delta.new_requests:
        return False
    delta.new_requests[0].req_index = state.limits.max_num_seqs
    return True


# --- blocks


@spoils("blocks.replace=0:.*null block")
def gives_the_null_block(delta, state):
    if not delta.new_requests:
        return False
    delta.new_requests[0].blocks[0].replace.ids[0] = 0
    return True


@spoils("blocks.append=.*null block")
def appends_a_block_that_does_not_exist(delta, state):
    row = _in(state, RowState.DECODE, delta)
    if row is None:
        return False
    delta.changes.add(req_index=row).blocks.add().append.ids.append(state.limits.num_blocks)
    return True


@spoils("blocks.kv_group=.*number of KV groups")
def names_a_kv_group_that_does_not_exist(delta, state):
    if not delta.new_requests:
        return False
    delta.new_requests[0].blocks[0].kv_group = state.limits.num_kv_groups
    return True


@spoils("blocks.kv_group=0: must be named once")
def changes_a_kv_group_twice(delta, state):
    row = _in(state, RowState.DECODE, delta)
    if row is None:
        return False
    change = delta.changes.add(req_index=row)
    change.blocks.add().append.ids.append(1)
    change.blocks.add().append.ids.append(2)
    return True


@spoils("must be one of append, drop_leading, state_slot")
def replaces_the_table_of_a_row_that_has_one(delta, state):
    row = _in(state, RowState.DECODE, delta)
    if row is None:
        return False
    delta.changes.add(req_index=row).blocks.add().replace.ids.append(1)
    return True


@spoils("must be one of replace, state_slot")
def appends_to_a_row_that_enters(delta, state):
    new = _plain_new(delta)
    if new is None:
        return False
    ids = list(new.blocks[0].replace.ids)
    new.blocks[0].append.ids.extend(ids)
    return True


@spoils("blocks=none: KV group 0 must have")
def gives_a_new_row_no_table(delta, state):
    new = _plain_new(delta)
    if new is None:
        return False
    del new.blocks[:]
    return True


@spoils("blocks hold \\d+ tokens|its blocks hold \\d+")
def gives_fewer_blocks_than_tokens_scheduled(delta, state):
    for new in delta.new_requests:
        covered = (len(new.blocks[0].replace.ids) - 1) * state.limits.block_size
        if 0 < covered < new.num_computed_tokens + new.num_scheduled_tokens:
            del new.blocks[0].replace.ids[-1]
            return True
    return False


@spoils("computed and 1 scheduled token: its blocks hold")
def forgets_the_block_that_a_decode_row_needs(delta, state):
    for change in delta.changes:
        facts = state.rows().get(change.req_index)
        if facts is not None and facts.state is RowState.DECODE and change.blocks:
            del change.blocks[:]
            return True
    return False


@spoils("drop_leading=.*entries of the table")
def drops_more_blocks_than_there_are(delta, state):
    row = _in(state, RowState.DECODE, delta)
    if row is None:
        return False
    delta.changes.add(req_index=row).blocks.add().drop_leading = len(_facts(state, row).tables[0]) + 1
    return True


@spoils("block_copies.dst_block_id=0:.*null block")
def copies_into_the_null_block(delta, state):
    delta.block_copies.add(src_block_id=1, dst_block_id=0)
    return True


@spoils("block_copies.src_block_id=.*null block")
def copies_from_a_block_that_does_not_exist(delta, state):
    delta.block_copies.add(src_block_id=state.limits.num_blocks + 5, dst_block_id=1)
    return True


@spoils("block_copies.dst_block_id=.*written once")
def copies_into_a_block_twice(delta, state):
    delta.block_copies.add(src_block_id=1, dst_block_id=2)
    delta.block_copies.add(src_block_id=3, dst_block_id=2)
    return True


# --- counts


@spoils("num_scheduled_tokens=.*left of its prefill|computed and scheduled ones")
def schedules_more_than_is_left_of_a_prefill(delta, state):
    if not delta.new_requests:
        return False
    new = delta.new_requests[0]
    new.num_scheduled_tokens = new.num_prefill_tokens - new.num_computed_tokens + 1
    return True


@spoils("num_scheduled_tokens=\\d+: a decode row computes 1 token, and num_speculative_tokens \\d at most")
def schedules_more_of_a_decode_row_than_it_may_try_ahead(delta, state):
    row = _in(state, RowState.DECODE, delta)
    if row is None or delta.mode != SchedulerDelta.MODE_RUN:
        return False
    delta.changes.add(req_index=row, num_scheduled_tokens=2 + state.limits.num_speculative_tokens)
    return True


@spoils("num_computed_tokens=\\d+: is said only of a preempted row, and of one that tried tokens ahead")
def corrects_a_row_that_tried_nothing_ahead(delta, state):
    row = next((row for row in _all_in(state, RowState.DECODE, delta) if not state._rows[row].num_unsettled), None)
    if row is None:
        return False
    delta.changes.add(req_index=row, num_computed_tokens=_facts(state, row).num_computed_tokens)
    return True


@spoils("num_computed_tokens=\\d+: must be \\d+ to \\d+, as it was scheduled")
def says_that_fewer_were_accepted_than_were_computed_anyway(delta, state):
    return _corrects(delta, state, lambda most, num_tried: most - num_tried - 1)


@spoils("num_computed_tokens=\\d+: must be \\d+ to \\d+, as it was scheduled")
def says_that_more_were_accepted_than_were_tried(delta, state):
    return _corrects(delta, state, lambda most, num_tried: most + 1)


@spoils("num_computed_tokens=\\d+: is said only .* when it next computes")
def corrects_a_row_that_it_pauses(delta, state):
    if not _corrects(delta, state, lambda most, num_tried: most - num_tried):
        return False
    delta.changes[-1].num_scheduled_tokens = 0
    return True


@spoils("awaits_mask=\\d+: a row under a mask tries no tokens ahead")
def tries_tokens_ahead_under_a_mask(delta, state):
    limits = state.limits
    if delta.mode != SchedulerDelta.MODE_RUN or not limits.num_speculative_tokens or delta.awaits_mask:
        return False
    for row in _all_in(state, RowState.DECODE, delta):
        facts = _facts(state, row)
        room = min(limits.block_size * len(facts.tables[0]), limits.max_model_len - 1)
        if facts.num_computed_tokens + 2 <= room:
            delta.changes.add(req_index=row, num_scheduled_tokens=2)
            delta.awaits_mask.append(row)
            return True
    return False


@spoils("num_scheduled_tokens=\\d+: the row's blocks hold \\d+ tokens")
def tries_tokens_ahead_without_blocks(delta, state):
    limits = state.limits
    if delta.mode != SchedulerDelta.MODE_RUN or not limits.num_speculative_tokens:
        return False
    for row in _all_in(state, RowState.DECODE, delta):
        facts = _facts(state, row)
        covered, num_tokens = limits.block_size * len(facts.tables[0]), 1 + limits.num_speculative_tokens
        if covered < facts.num_computed_tokens + num_tokens < limits.max_model_len:
            delta.changes.add(req_index=row, num_scheduled_tokens=num_tokens)
            return True
    return False


def _corrects(delta, state, of):
    if delta.mode != SchedulerDelta.MODE_RUN:
        return False
    for row, facts in state.rows().items():
        num_tried = state._rows[row].num_unsettled
        if num_tried and facts.state is RowState.DECODE and row not in _named(delta):
            delta.changes.add(req_index=row, num_computed_tokens=of(facts.num_computed_tokens, num_tried))
            return True
    return False


@spoils("comes back by a replacing change")
def schedules_a_preempted_row(delta, state):
    row = _in(state, RowState.PREEMPTED, delta)
    if row is None:
        return False
    delta.changes.add(req_index=row, num_scheduled_tokens=1)
    return True


@spoils("comes back by a replacing change")
def gives_a_preempted_row_blocks_without_counts(delta, state):
    row = _in(state, RowState.PREEMPTED, delta)
    if row is None:
        return False
    delta.changes.add(req_index=row).blocks.add().replace.ids.append(1)
    return True


@spoils("num_prefill_tokens=.*tokens it knows")
def resumes_a_row_with_fewer_tokens_than_it_knows(delta, state):
    for change in delta.changes:
        if change.HasField("num_prefill_tokens"):
            change.num_prefill_tokens -= 1
            return True
    return False


@spoils("num_computed_tokens=.*must be below num_prefill_tokens")
def resumes_a_row_with_nothing_to_compute(delta, state):
    for change in delta.changes:
        if change.HasField("num_prefill_tokens"):
            change.num_computed_tokens = change.num_prefill_tokens
            return True
    return False


@spoils("num_prefill_tokens=.*said only of a preempted row")
def says_what_to_prefill_of_a_decode_row(delta, state):
    row = _in(state, RowState.DECODE, delta)
    if row is None:
        return False
    delta.changes.add(req_index=row, num_prefill_tokens=3)
    return True


@spoils("num_computed_tokens=.*must be below num_prefill_tokens")
def enters_a_row_with_nothing_to_compute(delta, state):
    if not delta.new_requests:
        return False
    delta.new_requests[0].num_computed_tokens = delta.new_requests[0].num_prefill_tokens
    delta.new_requests[0].num_scheduled_tokens = 0
    return True


@spoils("num_prefill_tokens=.*tokens given")
def counts_other_tokens_than_it_gives(delta, state):
    new = _plain_new(delta)
    if new is None:
        return False
    new.num_prefill_tokens += 1
    return True


@spoils("must ascend from 1")
def enters_a_row_without_a_prompt(delta, state):
    new = _plain_new(delta)
    if new is None:
        return False
    new.num_prompt_tokens = 0
    return True


@spoils("must ascend from 1 and stay below max_model_len")
def enters_a_row_longer_than_the_context(delta, state):
    new = _plain_new(delta)
    if new is None:
        return False
    del new.token_ids[:]
    new.token_ids.extend([1] * state.limits.max_model_len)
    new.num_prefill_tokens = state.limits.max_model_len
    return True


@spoils("over all rows at most max_num_batched_tokens|left of its prefill")
def schedules_more_than_the_budget(delta, state):
    budget = state.limits.max_num_batched_tokens
    row = _free(state, delta)
    if row is None or budget + 2 >= state.limits.max_model_len:
        return False
    if delta.mode != SchedulerDelta.MODE_RUN:
        return False
    new = delta.new_requests.add(
        req_index=row, row_key=99, token_ids=[1] * (budget + 1), num_prompt_tokens=1, num_prefill_tokens=budget + 1
    )
    new.num_scheduled_tokens = budget + 1
    new.sampling.top_p = new.sampling.repetition_penalty = 1
    new.blocks.add().replace.ids.extend(range(1, (budget + 1) // state.limits.block_size + 2))
    return max(new.blocks[0].replace.ids) < state.limits.num_blocks


@spoils("nobody advances in a step of mode")
def schedules_tokens_in_a_step_of_bookkeeping(delta, state):
    if not any(new.num_scheduled_tokens for new in delta.new_requests):
        return False
    delta.mode = SchedulerDelta.MODE_APPLY_ONLY
    return True


# --- ids, forks, masks


@spoils("token_ids=.*size of the vocabulary")
def gives_a_token_outside_the_vocabulary(delta, state):
    new = _plain_new(delta)
    if new is None:
        return False
    new.token_ids[-1] = state.limits.vocab_size
    return True


@spoils("sampling.stop_ids=.*size of the vocabulary")
def stops_at_a_token_outside_the_vocabulary(delta, state):
    if not delta.new_requests:
        return False
    delta.new_requests[0].sampling.stop_ids.append(10**6)
    return True


@spoils("logit_bias_values=0: must be as many")
def biases_a_token_by_nothing(delta, state):
    if not delta.new_requests:
        return False
    delta.new_requests[0].sampling.logit_bias_ids.append(1)
    return True


@spoils("temperature=.*must be finite")
def has_an_infinite_temperature(delta, state):
    if not delta.new_requests:
        return False
    delta.new_requests[0].sampling.temperature = float("nan")
    return True


@spoils("sample_index=.*must be below n")
def has_more_samples_than_it_says(delta, state):
    if not delta.new_requests:
        return False
    delta.new_requests[0].sample_index = delta.new_requests[0].n
    return True


@spoils("cache_namespace=3 bytes")
def has_a_namespace_of_a_wrong_length(delta, state):
    if not delta.new_requests:
        return False
    delta.new_requests[0].cache_namespace = b"abc"
    return True


def _forking(delta: SchedulerDelta, parent: int) -> bool:
    new = _plain_new(delta)
    if new is None:
        return False
    del new.token_ids[:]
    new.fork_of = parent
    return True


@spoils("fork_of=.*stays in the batch")
def forks_from_a_free_row(delta, state):
    row = _free(state, delta)
    return row is not None and _forking(delta, row)


@spoils("fork_of=.*stays in the batch")
def forks_from_a_row_that_finishes(delta, state):
    return bool(delta.finished) and _forking(delta, delta.finished[0].req_index)


@spoils("fork_of=.*must be a decode row")
def forks_from_a_row_in_its_prefill(delta, state):
    row = _in(state, RowState.PREFILL, delta)
    return row is not None and _forking(delta, row)


@spoils("token_ids=.*must be empty with fork_of")
def forks_and_brings_tokens(delta, state):
    row, new = _in(state, RowState.DECODE, delta), _plain_new(delta)
    if row is None or new is None:
        return False
    new.fork_of = row
    return True


@spoils("num_prefill_tokens=.*that fork_of knows")
def forks_more_tokens_than_the_parent_knows(delta, state):
    row, new = _in(state, RowState.DECODE, delta), _plain_new(delta)
    if row is None or new is None:
        return False
    new.num_prefill_tokens = _facts(state, row).num_known_tokens + 1
    return _forking(delta, row)


@spoils("awaits_mask=.*must sample in this step")
def masks_a_row_that_does_not_sample(delta, state):
    row = _free(state, delta)
    if row is None:
        return False
    delta.awaits_mask.append(row)
    return True


@spoils("awaits_mask=.*must ascend")
def masks_rows_out_of_order(delta, state):
    delta.awaits_mask.extend([1, 0])
    return True


# --- what is reserved


@spoils("lane=1: must be 0")
def names_a_lane(delta, state):
    delta.lane = 1
    return True


@spoils("lane=2: must be 0")
def gives_a_row_a_lane(delta, state):
    if not delta.new_requests:
        return False
    delta.new_requests[0].lane = 2
    return True


@spoils("advance_limit=3: must be 1")
def lets_a_row_advance_by_three(delta, state):
    row = _in(state, RowState.DECODE, delta)
    if row is None:
        return False
    delta.changes.add(req_index=row, advance_limit=3)
    return True


@spoils("draft_token_ids=.*proposed by the ranks")
def proposes_draft_tokens(delta, state):
    row = _in(state, RowState.DECODE, delta)
    if row is None:
        return False
    delta.changes.add(req_index=row, draft_token_ids=[1])
    return True


@spoils("zero_blocks=.*must be empty")
def zeroes_blocks(delta, state):
    delta.zero_blocks.append(1)
    return True


@spoils("lora_slot=1: must be 0")
def names_an_adapter(delta, state):
    if not delta.new_requests:
        return False
    delta.new_requests[0].lora_slot = 1
    return True


@spoils("pooling.kind=7: must be LAST or MEAN")
def pools_in_an_unknown_way(delta, state):
    if not delta.new_requests:
        return False
    delta.new_requests[0].pooling.kind = 7
    return True


@spoils("pooling=set: must be unset with n above 1 or fork_of")
def pools_one_of_several_samples(delta, state):
    if not delta.new_requests:
        return False
    delta.new_requests[0].pooling.normalize = True
    delta.new_requests[0].n = 2
    return True


@spoils("pooling=set: must be unset for a row that knows more than its prompt of 1 tokens")
def pools_what_was_sampled(delta, state):
    new = _first_alone(delta)
    if new is None or new.num_prefill_tokens < 2:
        return False
    new.pooling.normalize = True
    new.num_prompt_tokens = 1
    return True


@spoils("num_computed_tokens=1: must be 0: a mean is over the hidden states of all tokens")
def pools_the_mean_of_what_the_cache_holds(delta, state):
    new = _first_alone(delta)
    if new is None or new.num_prefill_tokens < 2:
        return False
    new.pooling.kind = Pooling.KIND_MEAN
    new.num_prompt_tokens = new.num_prefill_tokens
    new.num_computed_tokens = 1
    return True


def _first_alone(delta):
    """Return the first row that enters as the only sample of its request."""
    return next((new for new in delta.new_requests if new.n <= 1 and not new.HasField("fork_of")), None)


@spoils("prompt_blob_hash=.*send the token ids")
def sends_a_prompt_by_hash(delta, state):
    if not delta.new_requests:
        return False
    delta.new_requests[0].prompt_blob_hash = b"\x01" * 32
    return True


@spoils("hold=True: must be unset")
def holds_the_blocks_of_a_finished_row(delta, state):
    if not delta.finished:
        return False
    delta.finished[0].hold = True
    return True


@spoils("mode=9: must be")
def has_an_unknown_mode(delta, state):
    delta.mode = 9
    return True
