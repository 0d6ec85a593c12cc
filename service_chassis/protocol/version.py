"""What Join negotiates: versions of the worker protocol and names of optional features (PROTOCOL B10)."""

MIN_PROTOCOL_VERSION = 1
MAX_PROTOCOL_VERSION = 1

# The rank serves everything RowSampling can say. Without it: greedy, seeded draws without filters, and forced output.
FEATURE_FULL_SAMPLING = "full_sampling"
# The rank serves rows that end with a vector (NewRequest.pooling).
FEATURE_POOLING = "pooling"
# The rank tells log-probabilities of tokens and prompts, and keeps them.
FEATURE_LOGPROBS = "logprobs"
# The rank was started so that it can give its memory back (Sleep, WakeUp).
FEATURE_SLEEP = "sleep"
# The rank's sampling waits for masks (SchedulerDelta.awaits_mask).
FEATURE_MASKS = "masks"
# The rank tries tokens ahead (GroupLimits.num_speculative_tokens), and its results have several tokens for a row.
FEATURE_SPECULATION = "speculation"
