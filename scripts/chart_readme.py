"""Write the table of values in the chart's README from values.yaml, whose comments are its texts.

Usage: python scripts/chart_readme.py [--check]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[1] / "helm/maniple"
_BEGIN, _END = "<!-- values, from values.yaml by `make chart-readme` -->", "<!-- end of values -->"
# `key: value   # comment`, where a value may hold a # only within quotes.
_LINE = re.compile(
    r"""^(?P<indent> *)(?P<key>[A-Za-z]+):(?P<rest>(?:[^#"']|"[^"]*"|'[^']*')*)(?:#\s*(?P<comment>.*))?$"""
)


def comments(text: str) -> dict[str, str]:
    """Return what stands behind each key, by its path."""
    found: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        depth = len(match["indent"])
        path = [*(one for one in path if one[0] < depth), (depth, match["key"])]
        if match["comment"]:
            found[".".join(key for _, key in path)] = match["comment"].strip()
    return found


def leaves(values: Any, texts: dict[str, str], path: str = "") -> list[tuple[str, Any]]:
    """Return the values that one sets, those of a flow mapping with one comment as one."""
    if isinstance(values, dict) and values and path not in texts:
        return [leaf for key, value in values.items() for leaf in leaves(value, texts, f"{path}.{key}".lstrip("."))]
    return [(path, values)]


def table(text: str) -> str:
    """Return the table in Markdown."""
    texts = comments(text)
    lines = ["| value | default | |", "|---|---|---|"]
    for path, value in leaves(yaml.safe_load(text), texts):
        words = texts.get(path, "").replace("|", r"\|")
        lines.append(f"| `{path}` | `{json.dumps(value)}` | {words} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the README is stale")
    arguments = parser.parse_args()
    readme = CHART / "README.md"
    old = readme.read_text()
    before, rest = old.split(_BEGIN)
    after = rest.split(_END)[1]
    new = f"{before}{_BEGIN}\n\n{table((CHART / 'values.yaml').read_text())}\n\n{_END}{after}"
    if arguments.check:
        if new != old:
            print("helm/maniple/README.md does not fit values.yaml: run `make chart-readme`", file=sys.stderr)
        return int(new != old)
    readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
