"""Run the stock gateway ``smg`` in this process, for as long as the process that started it lives.

``python -m control_plane.openai_gateway_process FD ARGUMENTS...``: FD is a pipe that closes with the parent.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time

_GRACE_S = 2.0


def _follow(parent_fd: int) -> None:
    """End this process when its parent has, whatever became of that."""
    while os.read(parent_fd, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Take the arguments of ``smg launch``."""
    parent_fd, *arguments = sys.argv[1:]
    threading.Thread(target=_follow, args=(int(parent_fd),), name="parent", daemon=True).start()
    from smg import cli, launch_router

    launch_router.print_banner = lambda *_: None  # its picture is for a terminal that it has to itself
    # Who may use the models may not add servers to them: that takes a key, which nobody has.
    key = f"nobody:nobody:admin:{secrets.token_urlsafe(32)}"
    sys.argv = ["smg", "launch", *arguments, "--control-plane-api-keys", key]
    cli.main()


if __name__ == "__main__":
    main()
