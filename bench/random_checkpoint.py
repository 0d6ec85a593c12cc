"""Write a small checkpoint of random weights that splits by 2, with the demo model's tokenizer: for faults beside vLLM.

The demo model has 9 query and 3 KV heads, which split by 3 only.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from control_plane.model_store import resolve_model
from support.tiny_checkpoints import tiny_config, write_checkpoint

SIZES = {
    "vocab_size": 49152,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def write_random_checkpoint(directory: Path) -> None:
    """Write it; the tokenizer is fetched where it was not yet."""
    write_checkpoint(directory, tiny_config("LlamaForCausalLM", **SIZES))
    demo = Path(resolve_model("demo", lambda what, share, detail: None).path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, directory / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    write_random_checkpoint(directory)
    print(f"{directory}: now --model {directory} --ranks 2")


if __name__ == "__main__":
    main()
