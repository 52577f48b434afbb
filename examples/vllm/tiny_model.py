"""Makes tiny models with random weights for trying vLLM out: nothing is downloaded.

Run it as ``python tiny_model.py FOLDER [KIND]``. The kinds are llama, large, sliding (every other
layer sees a window of 128 tokens) and mla (a latent cache, as DeepSeek's). In local, every other
layer sees the tokens since the last multiple of 128, as Llama 4's do. In conv every other layer has
a state, as Mamba's do; blip2 takes images.
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
    "local": {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512},
    "mla": {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512},
    "conv": {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512},
    "blip2": {"num_hidden_layers": 4, "hidden_size": 256},
}

IMAGE_SIZE = 56
"""Height and width, in pixels, of what the model that takes images looks at."""
IMAGE_TOKENS = 32
"""Tokens that stand for an image, before the prompt's own."""


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
    if kind == "local":
        config |= {
            "architectures": ["Llama4ForCausalLM"],
            "model_type": "llama4_text",
            "attention_chunk_size": 128,
            "layer_types": ["chunked_attention", "full_attention"] * 2,
            "no_rope_layers": [1, 0] * 2,
            "use_qk_norm": False,
            "intermediate_size_mlp": 512,
            "interleave_moe_layer_step": 0,  # no experts
            "moe_layers": [],
            "num_local_experts": 1,
        }
    if kind == "mla":
        config |= {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "num_key_value_heads": 4,
            "kv_lora_rank": 512,  # with the 64 below the only size that vLLM's kernel for CPU knows
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
            "head_dim": 64,
            "q_lora_rank": None,
            "first_k_dense_replace": 2,  # all layers: no experts are used
            "n_routed_experts": 2,
            "n_shared_experts": 1,
            "num_experts_per_tok": 1,
        }
    if kind == "conv":
        del config["head_dim"]
        config |= {
            "architectures": ["Lfm2ForCausalLM"],
            "model_type": "lfm2",
            "layer_types": ["conv", "full_attention"] * 2,
            "conv_dim": 256,
            "block_dim": 256,
            "block_auto_adjust_ff_dim": False,
        }
    if kind == "blip2":
        config = _takes_images(config)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tokenizer = _write_tokenizer(folder, "<image>" if kind == "blip2" else f"w{VOCABULARY - 1}")
    if kind == "blip2":
        _write_processor(folder, tokenizer)
    return str(folder)


def _takes_images(text: dict[str, Any]) -> dict[str, Any]:
    tower = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return {
        "architectures": ["Blip2ForConditionalGeneration"],
        "model_type": "blip-2",
        "vision_config": {
            **tower,
            "model_type": "blip_2_vision_model",
            "image_size": IMAGE_SIZE,
            "patch_size": 14,
        },
        "qformer_config": {
            **tower,
            "model_type": "blip_2_qformer",
            "vocab_size": VOCABULARY,
            "encoder_hidden_size": 64,
        },
        "text_config": {
            **text,
            "architectures": ["OPTForCausalLM"],
            "model_type": "opt",
            "ffn_dim": 512,
            "word_embed_proj_dim": 256,
        },
        "num_query_tokens": IMAGE_TOKENS,
        "image_token_index": VOCABULARY - 1,
        "torch_dtype": "bfloat16",
    }


def _write_tokenizer(folder: Path, last_word: str) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCABULARY - 1)}
    words[last_word] = VOCABULARY - 1
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    fast.save_pretrained(folder)
    return fast


def _write_processor(folder: Path, tokenizer: Any) -> None:
    from transformers import Blip2Processor, BlipImageProcessor

    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    square = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    pixels = BlipImageProcessor(size=square)
    Blip2Processor(pixels, tokenizer, IMAGE_TOKENS).save_pretrained(folder)


if __name__ == "__main__":
    print(make_model(Path(sys.argv[1]), *sys.argv[2:3]))
