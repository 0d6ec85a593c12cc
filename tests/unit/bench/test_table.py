"""The orchestrator: which rows it runs, in what turns, and that one row's trouble is not the others'."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest


class _Door:
    """Yields one token a message; remembers what it was sent."""

    def __init__(self, served: list[tuple[str, int]], name: str, *, short_by: int = 0) -> None:
        self._served = served
        self._name = name
        self._short_by = short_by
        self.prompts: list[tuple[int, ...]] = []

    async def stream(self, token_ids: Sequence[int], max_tokens: int) -> AsyncIterator[int]:
        self._served.append((self._name, max_tokens))
        self.prompts.append(tuple(token_ids))
        for _ in range(max_tokens - self._short_by):
            yield 1


class _Side:
    vocab_size = 800

    def __init__(self, name: str, served: list[tuple[str, int]], **options: Any) -> None:
        self.name = name
        self.door: Any = _Door(served, name, **options)
        self.cpu_readings: Iterator[float] = iter([])  # processor time, as it is read; none once they are over

    def is_alive(self) -> bool:
        return True

    def cpu_s(self) -> float:
        return next(self.cpu_readings, 0.0)


def _row(**load: Any) -> Any:
    from load import Length
    from rows import Beside, Load, at_least, tokens_per_s

    kept = {"num_requests": 1, "concurrency": 1, "input_len": Length(5, 5), "output_len": Length(4, 4)} | load
    return Beside(bench="row", what="some", load=Load(**kept), figures=tokens_per_s(at_least(1.0)))


def test_pairs_alternate_in_who_goes_first_after_both_were_warmed_up() -> None:
    from beside import run_beside

    served: list[tuple[str, int]] = []
    sides = [_Side("ours", served), _Side("vllm", served)]
    (line,) = asyncio.run(run_beside(_row(), sides, num_pairs=3, seed=1))
    warm, measured = served[:8], served[8:]
    assert {tokens for _, tokens in warm} == {8}
    assert {tokens for _, tokens in measured} == {4}
    assert [name for name, _ in measured] == ["ours", "vllm", "vllm", "ours", "ours", "vllm"]
    assert len(line["pairs"]) == len(line["runs"]) == 3
    # The same prompts to both, and other ones in every pair.
    ours, vllm = ([prompt for prompt in side.door.prompts if len(prompt) == 5][4:] for side in sides)
    assert ours == vllm
    assert len(set(ours)) == 3


def test_a_run_with_a_failed_request_is_no_figure() -> None:
    from beside import RowFailedError, run_beside

    sides = [_Side("ours", []), _Side("vllm", [], short_by=1)]
    with pytest.raises(RowFailedError, match=r"vllm: 4 of 4 requests failed: asked for 8 tokens, got 7"):
        asyncio.run(run_beside(_row(), sides, num_pairs=1, seed=1))


def test_open_loop_has_the_rate_that_follows_from_what_the_peer_can_do() -> None:
    from beside import run_beside

    served: list[tuple[str, int]] = []
    row = _row(num_requests=6, concurrency=0, share_of_capacity=0.5)
    (line,) = asyncio.run(run_beside(row, [_Side("ours", served), _Side("vllm", served)], num_pairs=1, seed=1))
    assert line["rate_per_s"] == pytest.approx(0.5 * line["peer_capacity_requests_per_s"], rel=1e-3)
    # Warm-up of 8 each, the peer's 6 that tell its capacity, then 6 each.
    assert [name for name, _ in served[16:22]] == ["vllm"] * 6
    assert len(served) == 16 + 6 + 12


def test_prompts_of_a_run_share_a_prefix_that_a_warm_run_sends_first() -> None:
    from beside import run_load

    side = _Side("ours", [])
    row = _row(num_requests=3, shared_prefix_len=20, prefix_is_warm=True)
    asyncio.run(run_load(side, row.load, seed="1"))
    first, *rest = side.door.prompts
    assert [len(prompt) for prompt in (first, *rest)] == [21, 25, 25, 25]
    assert {prompt[:20] for prompt in rest} == {first[:20]}
    assert len({prompt[20:] for prompt in rest}) == 3


def test_sweep_measures_every_server_at_every_concurrency() -> None:
    from beside import run_sweep
    from rows import Sweep

    served: list[tuple[str, int]] = []
    row = Sweep(bench="sweep", what="some", load=_row().load, concurrencies=(1, 4))
    (line,) = asyncio.run(run_sweep(row, [_Side("ours", served), _Side("vllm", served)], seed=1))
    assert {name: [at for at, _ in points] for name, points in line["points"].items()} == {
        "ours": [1, 4],
        "vllm": [1, 4],
    }
    assert [name for name, _ in served] == ["ours"] * 4 + ["vllm"] * 4 + ["ours"] * 8 + ["vllm"] * 8


def test_every_row_has_a_name_of_its_own_and_servers_that_can_be_started() -> None:
    from rows import SCENES
    from servers import RECIPES
    from table import failed_lines

    names = [line["bench"] for scene in SCENES for row in scene.rows for line in failed_lines(row, ValueError())]
    assert len(names) == len(set(names))
    assert {server for scene in SCENES for server in scene.servers} <= RECIPES.keys()


def test_chosen_rows_keep_only_the_scenes_that_have_them() -> None:
    from rows import chosen
    from table import needs_of

    scenes = chosen(["decode-1", "start"])
    assert [[row.bench for row in scene.rows] for scene in scenes] == [["decode-1"], ["start"]]
    assert needs_of(scenes) == {"ours", "vllm"}
    with pytest.raises(ValueError, match="no row is called decode-3; there are decode-32"):
        chosen(["decode-3"])


def test_unknown_row_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    from table import parse_arguments

    for flags, said in ((["--rows", "none"], "no row is called none"), (["--pairs", "0"], "a whole number from 1")):
        with pytest.raises(SystemExit):
            parse_arguments(flags)
        assert said in capsys.readouterr().err


SERVER = """
    import http.server, json, os, subprocess, sys
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print("child", child.pid, flush=True)

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"data": [{"id": "m"}]}).encode())

    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


def _program(path: Path, text: str) -> str:
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return str(path)


def test_rows_go_on_after_rows_and_servers_that_fail_and_no_process_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two programs, a server that cannot start, one that does and whose row fails: every row has its lines."""
    import servers
    import table
    from processes import is_alive
    from rows import Program, Scene

    monkeypatch.setattr(servers.tempfile, "gettempdir", lambda: str(tmp_path))
    server = _program(tmp_path / "server.py", SERVER)
    recipe = servers.Recipe(door="openai", words=lambda places, port: [sys.executable, server, str(port)])
    broken = replace(recipe, words=lambda places, port: [sys.executable, "-c", "raise SystemExit('no luck')"])
    monkeypatch.setattr(servers, "RECIPES", {"ours": recipe, "vllm": recipe, "broken": broken})
    line = '{"bench": "x", "ours": 1, "goal": "ours <= 2 s"}'
    prints = _program(tmp_path / "good.py", f"print('text')\nprint('{{\"all\": 1}}')\nprint('{line}')")
    ends = _program(tmp_path / "bad.py", "raise SystemExit(3)")
    good = Program(bench="good", what="w", words=(prints,))
    bad = Program(bench="bad", what="w", words=(ends,))
    scenes = [
        Scene(servers=("ours", "broken"), rows=(replace(_row(), bench="unstarted"),)),
        Scene(servers=("ours", "vllm"), rows=(replace(_row(), bench="unserved"),)),
        Scene(servers=(), rows=(bad, good)),
    ]
    arguments = table.parse_arguments(["--quick", "--results", str(tmp_path / "results"), "--machine", "here"])
    arguments.scenes = scenes
    where = servers.Places(model=tmp_path, gguf=tmp_path, vllm=tmp_path, llama=tmp_path)
    lines = {line["bench"]: line for line in asyncio.run(table.bench(arguments, where))}
    assert list(lines) == ["unstarted", "unserved", "bad", "good: x"]
    assert lines["good: x"]["measured"] == [{"all": 1}]
    assert [line["passed"] for line in lines.values()] == [False, False, False, True]
    assert "broken: it ended with exit code 1" in lines["unstarted"]["error"]
    assert "no luck" in lines["unstarted"]["error"]
    assert "requests failed" in lines["unserved"]["error"]
    assert lines["bad"]["error"].endswith("ended with exit code 3 and no line of JSON with a goal")
    (file,) = (tmp_path / "results").iterdir()
    kept = [json.loads(text) for text in file.read_text().splitlines()]
    assert kept[0]["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert [line["bench"] for line in kept[1:]] == list(lines)
    for name in ("ours", "vllm"):
        pid = int((tmp_path / f"maniple-bench-{name}.log").read_text().split()[1])
        deadline = time.monotonic() + 10.0
        while is_alive(pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not is_alive(pid), name


def test_both_get_the_same_prompts_and_no_run_has_those_of_another() -> None:
    from beside import run_beside

    ours, peer = _Side("ours", []), _Side("vllm", [])
    for bench in ("row", "other"):
        asyncio.run(run_beside(replace(_row(), bench=bench), [ours, peer], num_pairs=3, seed=1))
    assert set(ours.door.prompts) == set(peer.door.prompts)
    assert len(set(ours.door.prompts)) == len(ours.door.prompts)


def test_a_run_waits_until_nobody_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    import beside

    monkeypatch.setattr(beside, "_REST_WINDOW_S", 0.01)
    ours, peer = _Side("ours", []), _Side("peer", [])
    readings = [0.0, 0.01, 0.02, 0.03, 0.04, 0.04]  # twice a core, then rest
    peer.cpu_readings = iter(readings)
    asyncio.run(beside.until_at_rest([ours, peer]))
    assert list(peer.cpu_readings) == []
    monkeypatch.setattr(beside, "_REST_TIMEOUT_S", 0.05)
    peer.cpu_readings = itertools.count(0.0, 1.0)
    with pytest.raises(beside.RowFailedError, match=r"peer takes .*% of a core, with no request"):
        asyncio.run(beside.until_at_rest([ours, peer]))


def test_newest_line_counts_where_a_row_was_measured_twice(tmp_path: Path) -> None:
    from results import ResultFile, read

    file = ResultFile(tmp_path, "here", {"pairs": 3})
    for line in ({"bench": "a", "ours": 1}, {"bench": "b", "ours": 2}, {"bench": "a", "ours": 3}):
        file.append(line)
    lost = [{"bench": name, "ours": None, "error": "no server"} for name in ("b", "c")]
    for line in lost:
        file.append(line)
    assert read([file.path]) == {"a": {"bench": "a", "ours": 3}, "b": {"bench": "b", "ours": 2}, "c": lost[1]}


def test_processor_is_named_so_that_generations_differ() -> None:
    from results import cpu_name, slug_of

    text = "processor\t: 0\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\n\nprocessor\t: 1\n"
    assert cpu_name(text) == "AMD EPYC (family 26, model 2)"
    assert slug_of({"cpu": cpu_name(text), "cores": 2}) == "amd-epyc-family-26-model-2-2-cores"


def test_pictures_are_drawn_from_result_lines_and_are_the_same_again(tmp_path: Path) -> None:
    from plot import draw

    quantiles = {"quantiles_ms": {"ttft": [1.0, 2.0], "itl": [3.0, 4.0]}}
    beside = [
        {"rows": rows, "context": context, "waiting": 0, "ours_us": 20.0, "peer_us": 90.0}
        for rows in (1, 16)
        for context in (128, 4096)
    ]
    alone = [{"rows": 16, "context": 32000, "waiting": 0, "host_us": {"mean": 21.0}}]
    lines = {
        "steps: host cost": {"measured": [{"beside_vllm": beside}]},
        "steps-long: host cost": {"measured": [{"cases": alone}]},
        "concurrency": {"points": {"ours": [[1, 10.0], [2, 18.0]], "vllm": [[1, 9.0], [2, 12.0]]}},
        "open-loop TTFT p50": {"runs": [[{"server": "ours", **quantiles}, {"server": "vllm", **quantiles}]]},
    }
    written = draw(lines, tmp_path / "a")
    assert [path.name for path in written] == ["concurrency.svg", "steps.svg", "latency.svg"]
    assert all("vLLM" in path.read_text() and "Maniple" in path.read_text() for path in written)
    assert [path.read_bytes() for path in draw(lines, tmp_path / "b")] == [path.read_bytes() for path in written]
