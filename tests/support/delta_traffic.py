"""Random traffic for a ``Bench``: what hypothesis chooses from, and how it is played."""

from hypothesis import strategies as st

from control_plane.scheduling.request import FinishReason
from support.slot_hash_worker import VOCAB, make_request

REQUESTS = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(0, 2), min_size=1, max_size=30),  # few ids: many equal heads
        "max_tokens": st.integers(1, 20),
        "n": st.sampled_from([1, 1, 1, 2, 3]),
        "priority": st.integers(0, 1),
        "stop_ids": st.frozensets(st.integers(0, VOCAB - 1), max_size=6),
        "min_tokens": st.integers(0, 2),
        "skip_reading_prefix_cache": st.booleans(),
        "pooling": st.sampled_from([None, None, None, "last", "mean"]),
        "cache_namespace": st.sampled_from([b"", b"", b"s" * 16]),
    }
)
OPERATIONS = st.one_of(
    st.tuples(st.just("add"), REQUESTS),
    st.tuples(st.just("send"), st.none()),
    st.tuples(st.just("send"), st.none()),
    st.tuples(st.just("complete"), st.none()),
    st.tuples(st.just("turn"), st.integers(1, 6)),
    st.tuples(st.just("flush"), st.none()),
    st.tuples(st.just("abort"), st.tuples(st.integers(0, 30), st.sampled_from([None, None, 0, 1]))),
    st.tuples(st.just("pause"), st.tuples(st.integers(0, 30), st.booleans())),
    st.tuples(st.just("forget"), st.none()),
)
LIMITS = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 3, 4]),
        "num_blocks": st.integers(12, 60),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(6, 30),
        "max_model_len": st.integers(31, 60),
        "max_steps_in_flight": st.sampled_from([1, 2, 4]),
        "num_speculative_tokens": st.sampled_from([0, 0, 1, 3]),
    }
).map(lambda limits: {**limits, "max_steps_in_flight": 1} if limits["num_speculative_tokens"] else limits)


def play(bench, operations):
    """Do the operations, then go on to the end; return the requests that nobody touched."""
    requests, touched = [], set()
    for what, argument in operations:
        if what == "add":
            fields = dict(argument)
            request = make_request(f"r{len(requests)}", fields.pop("prompt"), fields.pop("max_tokens"), **fields)
            if bench.scheduler.refusal(request) is None:
                requests.append(bench.add(request))
        elif what == "send":
            bench.send()
        elif what == "complete" and bench.num_in_flight:
            bench.complete()
        elif what == "turn":
            for _ in range(argument):
                bench.turn()
        elif what == "flush":
            bench.flush()
        elif what == "abort" and requests:
            request = requests[argument[0] % len(requests)]
            bench.scheduler.finish(request.request_id, FinishReason.ABORT, sample_index=argument[1])
            touched.add(request)
        elif what == "pause" and requests:
            bench.scheduler.set_paused(requests[argument[0] % len(requests)].request_id, argument[1])
        elif what == "forget":
            bench.scheduler.forget_prefix_cache()
    for request in requests:
        bench.scheduler.set_paused(request.request_id, False)
    bench.run()
    return [request for request in requests if request not in touched]
