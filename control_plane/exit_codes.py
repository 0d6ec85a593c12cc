"""Name what a process's exit code says. In the README's table; scripts and orchestrators rely on it."""

OK = 0  # also a server that a signal stopped, whether its requests finished or ran out of time
FAILURE = 1  # a call failed, a server could not start
USAGE = 2  # bad flags or configuration; nothing was started
GROUP_LOST = 3  # the server lost its last group, and was told not to form it anew or failed too often
INTERRUPTED = 130  # Ctrl-C (128 + SIGINT): in a client, or before a server was ready
