"""LoRA adapters for the tiny models."""

import json
from pathlib import Path


def make_adapter(folder, model, seed):
    """Write a LoRA adapter with random weights for a tiny model."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    sizes = json.loads((Path(model) / "config.json").read_text())
    hidden, layers, head = (
        sizes[name] for name in ("hidden_size", "num_hidden_layers", "head_dim")
    )
    noise = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(layers):
        for name, width in (("q_proj", 4 * head), ("v_proj", 2 * head)):
            base = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{base}.lora_A.weight"] = torch.randn(8, hidden, generator=noise)
            weights[f"{base}.lora_B.weight"] = torch.randn(width, 8, generator=noise)
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "r": 8,
                "lora_alpha": 8,
                "target_modules": ["q_proj", "v_proj"],
                "bias": "none",
                "task_type": "CAUSAL_LM",
            }
        )
    )
    return str(folder)
