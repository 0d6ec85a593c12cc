"""What a command says when it reaches nobody."""

from __future__ import annotations

import grpc
import pytest

from control_plane.cli import generate
from control_plane.cli.connection import report
from control_plane.exit_codes import FAILURE, OK
from maniple_client.errors import DeadlineExceeded, TransportLost
from support.fake_server import running


def test_lost_connection_names_address_and_tls(capsys: pytest.CaptureFixture[str]) -> None:
    error = TransportLost(grpc.StatusCode.UNAVAILABLE, "Socket closed")
    assert report("maniple generate", error, "127.0.0.1:50051") == FAILURE
    said = capsys.readouterr()
    assert said.out == ""
    assert "Socket closed" in said.err
    assert "127.0.0.1:50051" in said.err
    assert "--tls-ca" in said.err


def test_passed_deadline_is_said_as_one_whatever_grpc_calls_it(capsys: pytest.CaptureFixture[str]) -> None:
    error = DeadlineExceeded(grpc.StatusCode.DEADLINE_EXCEEDED, "Stream removed (Deadline Exceeded)")
    assert report("maniple generate", error, "127.0.0.1:50051") == FAILURE
    assert capsys.readouterr().err == "maniple generate: the deadline passed\n"


def test_server_may_be_several_of_which_one_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with running() as there:
        assert generate.run(["hello", "--server", f"127.0.0.1:1,{there.address}"]) == OK
    assert capsys.readouterr().out == "The sky is blue.\n"
