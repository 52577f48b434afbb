"""Makes tiny models with random weights for trying vLLM out: nothing is downloaded.

Run it as ``python tiny_model.py FOLDER [KIND]``; kinds: llama, sliding, large.
"""

import json
import sys
from pathlib import Path
from typing import Any

VOCABULARY = 512

_SIZES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512},
    "large": {"num_hidden_layers": 12, "hidden_size": 768, "intermediate_size": 2048},
    "sliding": {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512},
}


def make_model(folder: Path, kind: str = "llama", max_tokens: int = 8192) -> str:
    """Write the configuration and the tokenizer of a tiny model; return the folder as text.

    Start it with ``load_format="dummy"``: the weights come from the seed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        **_SIZES[kind],
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_attention_heads": 4 if kind != "large" else 12,
        "num_key_value_heads": 2 if kind != "large" else 12,
        "head_dim": 64,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": max_tokens,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if kind == "sliding":
        config |= {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 64,
        }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    _write_tokenizer(folder)
    return str(folder)


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    fast.save_pretrained(folder)


if __name__ == "__main__":
    print(make_model(Path(sys.argv[1]), *sys.argv[2:3]))
