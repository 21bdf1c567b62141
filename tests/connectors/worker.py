"""One engine process of the tests: `python worker.py MODEL_DIR SOCKET LENGTH SEED`.

Prints `{"tokens": [...], "reused": n, "stored": n}` for a prompt of random tokens.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModelForCausalLM

from kvd.connectors.transformers import KvdCache

torch.set_num_threads(1)
folder, socket, length, seed = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
ids = torch.randint(
    0, model.config.vocab_size, (1, int(length)), generator=torch.Generator().manual_seed(int(seed))
)
with KvdCache(model, socket, chunk_tokens=16, deadline_s=10.0) as kv:
    tokens = kv.generate(ids, max_new_tokens=12, do_sample=False)[0].tolist()
    print(
        json.dumps(
            {
                "tokens": tokens,
                "reused": kv.counts["reused_tokens"],
                "stored": kv.counts["stored_chunks"],
            }
        )
    )
