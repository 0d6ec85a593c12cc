"""KServe's door where its stubs are not installed: absent, and said so in one sentence."""

from __future__ import annotations

from typing import Any, cast

import grpc
import pytest
from structlog.testing import capture_logs

from control_plane.cli import serve
from control_plane.doors import kserve_extra


def test_door_is_absent_and_named_where_its_stubs_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kserve_extra, "is_installed", lambda: False)
    nothing = cast(Any, None)  # neither fleet nor model is asked
    with capture_logs() as logs:
        added = kserve_extra.open_door(
            cast(grpc.aio.Server, nothing), nothing, nothing, version="0", new_seed=lambda: 0
        )
    assert added == ()
    (line,) = logs
    assert (line["event"], line["service"]) == ("door.absent", "inference.GRPCInferenceService")
    assert line["reason"] == "needs the package tritonclient: pip install 'maniple[kserve]'"
    assert "KServe clients are not served: inference.GRPCInferenceService needs the package" in (
        serve.parser().format_help()
    )


def test_help_says_that_the_door_is_there() -> None:
    assert "KServe clients are served too" in serve.parser().format_help()
