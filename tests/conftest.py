"""Settings that must be made before anything imports torch; child processes inherit them."""

import os

# Several test processes share the cores: a thread that waits must not hold one.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
