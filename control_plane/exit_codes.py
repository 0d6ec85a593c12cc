"""Name what a process's exit code says. In the README's table; scripts and orchestrators rely on it."""

OK = 0
FAILURE = 1  # a call failed, a server could not start
USAGE = 2  # bad flags or configuration; nothing was started
GROUP_LOST = 3  # the server lost its group and cannot form it anew
INTERRUPTED = 130  # Ctrl-C (128 + SIGINT)
