"""What a command says when it reaches nobody."""

from __future__ import annotations

import grpc
import pytest

from control_plane.cli import generate
from control_plane.cli.connection import report
from control_plane.exit_codes import FAILURE, OK, USAGE
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
    report("maniple generate", TransportLost(grpc.StatusCode.UNAVAILABLE, "… CERTIFICATE_VERIFY_FAILED …"), "a:1")
    assert "No authority of --tls-ca signed its certificate." in capsys.readouterr().err


def test_server_that_speaks_no_tls_is_told_from_one_that_wants_it(capsys: pytest.CaptureFixture[str]) -> None:
    message = "Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: OPENSSL_internal:WRONG_VERSION_NUMBER"
    report("maniple status", TransportLost(grpc.StatusCode.UNAVAILABLE, message), "127.0.0.1:50051")
    said = capsys.readouterr().err
    assert "leave out --tls-ca" in said
    assert "needs --tls-ca" not in said


def test_address_without_a_port_is_said_to_be_one_of_443(capsys: pytest.CaptureFixture[str]) -> None:
    report("maniple status", TransportLost(grpc.StatusCode.UNAVAILABLE, "refused"), "127.0.0.1:50051,localhost")
    assert "443" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--token-file", "none"], "--token-file none: cannot be read: No such file"),
        (["--tls-ca", __file__], f"--tls-ca {__file__}: holds no certificate in PEM"),
        (["--tls-ca", "none"], "--tls-ca none: cannot be read: No such file"),
        (["--server", "a:1,http://b:2"], "--server http://b:2: must be HOST:PORT or unix:PATH"),
    ],
)
def test_wrong_flags_of_a_connection_are_named(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        generate.run(["hello", *flags])
    assert caught.value.code == USAGE
    assert f"maniple generate: {said}" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--json"], ["--n", "2"]])
def test_failure_before_the_answer_leaves_standard_output_empty(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate.run(["hello", "--server", "127.0.0.1:1", *flags]) == FAILURE
    assert capsys.readouterr().out == ""


def test_passed_deadline_is_said_as_one_whatever_grpc_calls_it(capsys: pytest.CaptureFixture[str]) -> None:
    error = DeadlineExceeded(grpc.StatusCode.DEADLINE_EXCEEDED, "Stream removed (Deadline Exceeded)")
    assert report("maniple generate", error, "127.0.0.1:50051") == FAILURE
    assert capsys.readouterr().err == "maniple generate: the deadline passed\n"


def test_server_may_be_several_of_which_one_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with running() as there:
        assert generate.run(["hello", "--server", f"127.0.0.1:1,{there.address}"]) == OK
    assert capsys.readouterr().out == "The sky is blue.\n"
