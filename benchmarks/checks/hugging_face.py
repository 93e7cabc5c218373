"""Does Hugging Face's own Llama compute what ours does from what `export` writes? Writes data/hugging_face.json.

    pip install transformers
    python benchmarks/checks/hugging_face.py

A model of ours (grouped-query attention, tied or not) is saved and exported in shards with an index;
`transformers.LlamaForCausalLM.from_pretrained` loads it, and both give logits for the same tokens in fp32.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import transformers

from harness.checkpoint import foreign
from harness.checkpoint.folder import path_of
from harness.store.files import write_json
from tests.checkpoint.test_foreign import saved

OUT = Path(__file__).resolve().parents[1] / "data" / "hugging_face.json"


def distance(folder: Path, *, tied: bool) -> dict[str, Any]:
    """Largest difference of a logit, and the largest logit."""
    run, _, config = saved(folder / "run", model__tie_embeddings=tied, model__rope_theta=500_000.0)
    index = foreign.export_hugging_face(path_of(run / "ckpt", 4), folder / "hf", config, shard_bytes=20_000)
    from tests.engines.test_replicated import build

    engine: Any = build(config)
    ours = engine.model
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    tokens = torch.randint(0, config.model.vocab_size, (3, 16), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        a, b = ours(tokens), theirs(tokens).logits
    return {
        "tied": tied,
        "files": len(set(index["weight_map"].values())),
        "largest_difference": (a - b).abs().max().item(),
        "largest_logit": a.abs().max().item(),
    }


def main() -> int:
    """Both kinds of model; 1 where a difference is more than rounding."""
    rows = []
    for tied in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(distance(Path(folder), tied=tied))
    write_json(OUT, {"transformers": transformers.__version__, "torch": torch.__version__, "rows": rows})
    for row in rows:
        print(row)
    return int(any(row["largest_difference"] > 1e-5 * row["largest_logit"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
