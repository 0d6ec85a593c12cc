from __future__ import annotations

import json
import logging

import pytest

from service_chassis.protocol.delta_log import StepLog
from service_chassis.telemetry import LogFormat, get_logger
from support.logs import captured_log


def test_step_log_returns_what_comes_after_a_step() -> None:
    log: StepLog[str] = StepLog(max_items=9)
    for step in (1, 2, 4, 7):
        log.append(step, f"s{step}")
    assert log.after(2) == [(4, "s4"), (7, "s7")]
    assert log.after(7) == []
    assert log.after(0) == [(1, "s1"), (2, "s2"), (4, "s4"), (7, "s7")]


def test_step_log_forgets_the_oldest_when_full() -> None:
    log: StepLog[int] = StepLog(max_items=3)
    for step in range(1, 8):
        log.append(step, step)
    assert log.after(0) == [(5, 5), (6, 6), (7, 7)]


def test_step_log_refuses_a_step_out_of_order() -> None:
    log: StepLog[int] = StepLog(max_items=9)
    log.append(3, 3)
    with pytest.raises(AssertionError):
        log.append(3, 3)


def test_log_lines_are_json_on_a_pipe_whoever_wrote_them() -> None:
    with captured_log("info", "auto", rank=3) as stream:
        get_logger(epoch=4).info("group.formed", duration_s=0.5)
        get_logger().debug("step.applied")
        logging.getLogger("grpc").warning("from %s", "elsewhere")
        logging.getLogger("httpx").info("request body")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["group.formed", "from elsewhere"]
    assert (lines[0]["rank"], lines[0]["epoch"], lines[0]["level"]) == (3, 4, "info")
    assert lines[1]["rank"] == 3


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_tracebacks_do_not_show_local_variables(log_format: LogFormat) -> None:
    prompt = "".join(["the ", "user's ", "words"])
    with captured_log("info", log_format) as stream:
        try:
            raise ValueError(len(prompt))
        except ValueError:
            get_logger().exception("call.crashed")
    assert "ValueError: 16" in stream.getvalue()
    assert "the user's words" not in stream.getvalue()
