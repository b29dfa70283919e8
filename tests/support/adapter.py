"""A tiny random LoRA adapter for the tiny model."""

from __future__ import annotations

import json
from pathlib import Path

RANK = 8


def adapter(folder: Path, model: Path, seed: int) -> Path:
    """A folder as PEFT writes it, of every projection of attention, so that its KV is not the model's."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, head = config["hidden_size"], config["head_dim"]
    outputs = {
        "q_proj": head * config["num_attention_heads"],
        "k_proj": head * config["num_key_value_heads"],
        "v_proj": head * config["num_key_value_heads"],
    }
    chance = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, output in outputs.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_"
            tensors[f"{prefix}A.weight"] = torch.randn(RANK, hidden, generator=chance) / hidden**0.5
            tensors[f"{prefix}B.weight"] = torch.randn(output, RANK, generator=chance)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(outputs),
        "base_model_name_or_path": str(model),
    }
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder
