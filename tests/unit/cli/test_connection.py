"""What a command says when it reaches nobody."""

from __future__ import annotations

import grpc
import pytest

from control_plane.cli.connection import report
from control_plane.exit_codes import FAILURE
from maniple_client.errors import TransportLost


def test_lost_connection_names_address_and_tls(capsys: pytest.CaptureFixture[str]) -> None:
    error = TransportLost(grpc.StatusCode.UNAVAILABLE, "Socket closed")
    assert report("maniple generate", error, "127.0.0.1:50051") == FAILURE
    said = capsys.readouterr()
    assert said.out == ""
    assert "Socket closed" in said.err
    assert "127.0.0.1:50051" in said.err
    assert "--tls-ca" in said.err
