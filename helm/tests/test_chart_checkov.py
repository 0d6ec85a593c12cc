"""What checkov finds in the rendered pods, those inside a LeaderWorkerSet lifted out, since it would not look there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from rendering import CI_FILES, render

from support.platform_tools import checkov

# Each with the reason why it does not fit.
_LEFT_OUT = {
    "CKV_K8S_11": "a limit of CPU throttles a server in the middle of a step; requests reserve what it needs",
    "CKV_K8S_15": "nothing changes behind a digest or a version; a pull for each start costs minutes",
    "CKV_K8S_43": "digests are values: image.*.digest",
    "CKV_K8S_35": "secrets are files, but for the hub's token, which its client takes from a variable",
    "CKV_K8S_40": "10001 is high enough",
    "CKV2_K8S_6": "it sees no policies of other files; test_chart_properties.py checks that each pod has one",
}


@pytest.mark.timeout(300)
def test_checkov_finds_nothing_in_any_pod(tmp_path: Path) -> None:
    for file in CI_FILES:
        objects = []
        for owner, pod in render(file).pods():
            if owner["kind"] == "LeaderWorkerSet":
                name = owner["metadata"]["name"]
                owner = {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "metadata": {"name": name, **pod["metadata"]},
                    "spec": pod["spec"],
                }
            objects.append({**owner, "metadata": {**owner["metadata"], "namespace": "llm"}})
        (tmp_path / f"{file.stem}.yaml").write_text(yaml.safe_dump_all(objects))
    words = ["--framework", "kubernetes", "--compact", "--quiet", "--output", "json", "--directory", str(tmp_path)]
    done = checkov().run(*words, "--skip-check", ",".join(_LEFT_OUT), timeout_s=240)
    report = json.loads(done.stdout)
    assert report["summary"]["passed"] > 100, done.stderr
    failed = report["results"]["failed_checks"]
    found = {
        (one["check_id"], one["check_name"], one["resource"])
        for one in failed
        # The pod of `helm test` ends by itself: nothing to probe.
        if not (one["resource"].endswith("-test-generate") and one["check_id"] in ("CKV_K8S_8", "CKV_K8S_9"))
    }
    assert found == set()
