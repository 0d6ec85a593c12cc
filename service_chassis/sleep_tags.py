"""What of a group can sleep (``SleepRequest`` and ``WakeUpRequest`` of admin.proto)."""

WEIGHTS = "weights"
KV_CACHE = "kv_cache"
MEMORY_TAGS = (WEIGHTS, KV_CACHE)  # what ranks hold; in the order in which it wakes
SCHEDULING = "scheduling"  # the control plane's alone
SLEEP_TAGS = (*MEMORY_TAGS, SCHEDULING)
DEEPEST_SLEEP = 2
