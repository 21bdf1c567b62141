"""A Llama of 2.9 million random weights, as an ordinary Hugging Face folder.

Its weights are large enough (initializer_range 0.2) that greedy choices are no near ties.

    python tiny_model.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path


def make(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        initializer_range=0.2,
        dtype="float32",
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    words |= {f"w{number}": number for number in range(4, 1024)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    ).save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
