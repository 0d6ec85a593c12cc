"""What a control plane tells Prometheus: every metric by its name. docs/observability.md has the same table.

The names beginning with vllm: mean what they mean there, so that dashboards carry over; the others are ours.
"""

from __future__ import annotations

from service_chassis.metrics import COUNTER, GAUGE, HISTOGRAM, Metric, by_name, doubling

GROUP = ("model_name", "engine")  # of everything about one group; `engine` is the group's name: 0, 1, …

STATES = ("forming", "held", "ready", "draining", "asleep", "lost")  # as in admin.proto
PHASES = ("schedule", "send", "execute", "apply", "publish")
FINISHED_REASONS = ("stop", "length", "abort")
TAGS = ("scheduling", "weights", "kv_cache")

_LATENCY_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
_REQUEST_S = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 1920.0)
_TOKEN_S = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 40.0)
_TOKENS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6)
_PHASE_S = (2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_LIFE_S = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, GAUGE, text, (*GROUP, *labels))


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, COUNTER, text, (*GROUP, *labels))


def _histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    return Metric(name, HISTOGRAM, text, (*GROUP, *labels), buckets)


METRICS = by_name(
    [
        # As in vLLM
        _gauge("vllm:num_requests_running", "Samples that hold a row and blocks."),
        _gauge("vllm:num_requests_waiting", "Samples that wait for a row, for blocks or for the end of a pause."),
        _gauge("vllm:kv_cache_usage_perc", "Share of KV blocks that rows hold; 1 is all of them."),
        _counter("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache."),
        _counter("vllm:prefix_cache_hits_total", "Prompt tokens found there."),
        _counter("vllm:num_preemptions_total", "Rows that lost their blocks, to be computed again."),
        _counter("vllm:prompt_tokens_total", "Prompt tokens of requests that started, those found in the cache too."),
        _counter("vllm:generation_tokens_total", "Tokens sampled for clients."),
        _counter(
            "vllm:request_success_total",
            "Requests that came to their end, by why their first sample ended.",
            "finished_reason",
        ),
        _histogram("vllm:time_to_first_token_seconds", "From a request's arrival here to its first token.", _LATENCY_S),
        _histogram(
            "vllm:inter_token_latency_seconds",
            "Between two results of a step, once for each row that got a token then and was no beginner.",
            _TOKEN_S,
        ),
        _histogram(
            "vllm:request_time_per_output_token_seconds",
            "Time from the first to the last token of a request, divided by the tokens after the first.",
            _TOKEN_S,
        ),
        _histogram("vllm:e2e_request_latency_seconds", "From a request's arrival here to its end.", _REQUEST_S),
        _histogram("vllm:request_queue_time_seconds", "From arrival to the first step with it.", _REQUEST_S),
        _histogram("vllm:request_prefill_time_seconds", "From that step to the first token.", _REQUEST_S),
        _histogram("vllm:request_decode_time_seconds", "From the first token to the end.", _REQUEST_S),
        _histogram("vllm:request_inference_time_seconds", "From the first step with it to the end.", _REQUEST_S),
        _histogram("vllm:request_prompt_tokens", "Prompt tokens of a request that ended.", _TOKENS),
        _histogram("vllm:request_generation_tokens", "Tokens that it got, all samples together.", _TOKENS),
        _histogram("vllm:iteration_tokens_total", "Tokens that one step computes.", doubling(1.0, 15)),
        # Ours: of a group
        _gauge("maniple_group_state", "1 for the state that the group is in, 0 for the others.", "state"),
        _gauge("maniple_group_epoch", "Tenures of the group so far, the present one included."),
        _gauge("maniple_group_step", "The last step that was planned, counted from the group's formation."),
        _gauge("maniple_group_ranks", "Ranks that the group has."),
        _gauge("maniple_kv_blocks", "KV blocks: held by rows (used), cached for a later prefix, or free.", "use"),
        _gauge("maniple_waiting_tokens", "Tokens to be computed before all that waits has its first token."),
        _gauge("maniple_weight_bytes", "Weights of the group, summed over its ranks."),
        _gauge("maniple_kv_cache_bytes", "KV cache of the group, summed over its ranks."),
        _gauge("maniple_rank_connected", "1 while the rank's stream of steps is open.", "rank"),
        _gauge("maniple_rank_silent_seconds", "Time since the rank was heard, on the quieter connection.", "rank"),
        _gauge("maniple_rank_completed_step", "The last step that the rank is known to have completed.", "rank"),
        _histogram(
            "maniple_step_phase_seconds",
            "What a step costs: planning, encoding and sending, sent until answered, applying the result, telling.",
            _PHASE_S,
            "phase",
        ),
        _counter("maniple_steps_total", "Steps sent: with computation (run) or bookkeeping (apply_only).", "mode"),
        _histogram("maniple_delta_bytes", "Size of one delta, as every rank gets it.", doubling(16.0, 17)),
        _counter("maniple_watchdog_suspicions_total", "Times that the watchdog found a group unhealthy and not lost."),
        _counter("maniple_group_losses_total", "Groups that were lost, by what was found.", "cause"),
        _histogram("maniple_formation_seconds", "Forming a group: start, load, profile, allocate, warm up.", _LIFE_S),
        _histogram("maniple_takeover_seconds", "Taking a living group over from another owner.", _LIFE_S),
        _counter("maniple_requests_failed_total", "Requests that ended in an error, by the error.", "error"),
        _counter("maniple_requests_moved_total", "Requests of a lost group that went on in this one."),
        # Ours: of the control plane
        Metric("maniple_build_info", GAUGE, "Always 1.", ("version", "model_name")),
        Metric("maniple_ready", GAUGE, "1 while a group here accepts and computes new requests."),
        Metric("maniple_serving", GAUGE, "1 while new requests are served, here or through the owner of a group."),
        Metric("maniple_draining", GAUGE, "1 from a drain, a handover or SIGTERM on."),
        Metric("maniple_asleep", GAUGE, "1 for what sleeps; scheduling alone is a pause.", ("tag",)),
        Metric("maniple_relayed_calls_total", COUNTER, "Calls passed on to the owner of a group.", ("method",)),
        Metric("maniple_refused_requests_total", COUNTER, "Requests that were not let in, by the error.", ("error",)),
    ]
)
