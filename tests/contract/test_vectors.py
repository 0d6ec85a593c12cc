"""What every language must agree on, against vectors of a C implementation written from docs/protocol.md alone."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from service_chassis.protocol.block_hash import block_hash, namespace_of, root_hash
from service_chassis.protocol.digest import StateDigest, mix, row_factor, token_term
from service_chassis.protocol.noise import noise_bits, noise_key

VECTORS = Path(__file__).parent / "vectors"
KNOWN: dict[str, list[dict[str, Any]]] = json.loads((VECTORS / "vectors.json").read_text())


@pytest.mark.parametrize("case", KNOWN["mix"], ids=lambda case: str(case["x"]))
def test_mix(case: dict[str, str]) -> None:
    assert mix(int(case["x"], 16)) == int(case["mix"], 16)


def test_mix_is_the_published_splitmix64() -> None:
    # The first outputs of splitmix64 for seed 1234567, as published with it.
    golden, outputs = 0x9E3779B97F4A7C15, []
    for number in range(3):
        outputs.append(mix((1234567 + number * golden) % 2**64))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_state_digest() -> None:
    digest = StateDigest()
    for req_index, row in enumerate(KNOWN["state_digest"]):
        digest.add(req_index, int(row["row_key"], 16))
        digest.put_blocks(req_index, row["kv_group"], 0, row["blocks"])
        digest.compute(req_index, row["num_computed_tokens"])
        assert digest.value == int(row["digest_so_far"], 16)
    for req_index, row in enumerate(KNOWN["state_digest"]):
        digest.remove(req_index, row["num_computed_tokens"])
    assert digest.value == 0


def test_token_digest() -> None:
    total = 0
    for token in KNOWN["token_digest"]:
        total += token_term(row_factor(int(token["row_key"], 16)), token["position"], token["token_id"])
        assert total % 2**64 == int(token["digest_so_far"], 16)


@pytest.mark.parametrize("case", KNOWN["block_hash"], ids=lambda case: f"lora-{case['lora']}-salt-{case['cache_salt']}")
def test_block_hash_chain(case: dict[str, Any]) -> None:
    namespace = namespace_of(case["lora"], case["cache_salt"])
    assert namespace.hex() == case["namespace"]
    parent = root_hash(namespace)
    assert parent.hex() == case["root"]
    for block in case["blocks"]:
        parent = block_hash(parent, block["token_ids"])
        assert parent.hex() == block["hash"]


@pytest.mark.parametrize("case", KNOWN["noise"], ids=lambda case: f"{case['seed']}-{case['position']}")
def test_noise(case: dict[str, Any]) -> None:
    k0, k1 = noise_key(int(case["seed"], 16), case["sample_index"], case["position"])
    bits = noise_bits(k0, k1, case["token_id"])
    assert f"{bits:08x}" == case["bits"]
    v = min((bits + 0.5) / 2**32, 1 - 2**-24)
    assert -math.log(-math.log1p(-v)) == pytest.approx(case["gumbel"], abs=1e-5)


def test_vectors_are_what_the_reference_prints(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    program = tmp_path / "reference"
    source = str(VECTORS / "reference.c")
    subprocess.run([compiler, "-std=c11", "-O1", "-o", str(program), source, "-lm"], check=True, timeout=60)
    printed = subprocess.run([str(program)], check=True, capture_output=True, text=True, timeout=10).stdout
    assert printed == (VECTORS / "vectors.json").read_text()
