"""``serve --record-deltas`` and ``replay``, as people run them; the log outlives a killed control plane."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from pathlib import Path

from maniple_client import Client
from support.serve_process import serving
from support.takeover import Reading, all_free, prompt_of, site


def replay(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "control_plane.cli", "replay", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_log_of_a_killed_and_a_drained_server_replays_to_its_digests(tmp_path: Path) -> None:
    path = tmp_path / "deltas.log"
    for number in (signal.SIGKILL, signal.SIGTERM):
        with serving("--model", "scripted", "--executor", "mp", "--record-deltas", str(path)) as server:
            with Client(server.address) as client:
                streams = [
                    client.generate(token_ids=[1, 2, seed], max_tokens=20, ignore_eos=True, seed=seed, n=2)
                    for seed in range(3)
                ]
                for stream in streams:
                    stream.text()
            server.signal(number)
            assert server.exit_code() == (-9 if number is signal.SIGKILL else 0)
    assert path.stat().st_mode & 0o777 == 0o600
    done = replay(path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        found = re.fullmatch(
            r"group 0, formation \w+, epoch 1, ranks 1: steps 1 to (\d+): every state digest equal; "
            r"(\d+) results, (\d+) token digests equal",
            line,
        )
        assert found, line
        # 20 tokens each; what was under way to the file when the process was killed may be missing.
        assert int(found[1]) >= 20
        assert 0 <= int(found[2]) - int(found[3]) <= 2


async def test_log_goes_on_where_a_spare_takes_over(tmp_path: Path) -> None:
    path = tmp_path / "deltas.log"
    async with site(tmp_path) as here:
        owner, spare = await here.owner_and_spare("--record-deltas", str(path))
        async with here.client() as client, asyncio.timeout(60):
            reading = Reading(client, "r", prompt_of(1), 80)
            await reading.has(20)
            owner.signal(signal.SIGKILL)
            await reading.whole()
        await all_free(spare)
        spare.signal(signal.SIGTERM)
        assert await spare.exit_code() == 0
    done = replay(path)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    first, second = done.stdout.splitlines()
    last_step = int(re.findall(r"epoch 1, .*: steps 1 to (\d+): every state digest equal", first)[0])
    assert re.search(rf"epoch 2, .*: steps {last_step + 1} to \d+: every state digest equal", second), done.stdout


def test_replay_of_something_else_exits_2(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("no log")
    done = replay(tmp_path / "x")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"maniple replay: {tmp_path / 'x'}: does not begin with the line")
