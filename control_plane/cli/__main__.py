"""``python -m control_plane.cli``: the ``maniple`` command of this interpreter."""

import sys

from control_plane.cli.main import main

sys.exit(main())
