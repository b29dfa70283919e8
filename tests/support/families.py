"""Tiny models of the families that kvbus must carry, with random weights: made once, always the same.

The weights are drawn wide and the norms left at one. With vLLM's ``--load-format dummy`` all weights are near nothing:
the last token alone decides the answer there, and the KV of another prompt would give the same one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCABULARY = 2048
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.12,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def _llama() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**_COMMON, head_dim=32)


def _mistral() -> Any:
    from transformers import MistralConfig

    return MistralConfig(**_COMMON, head_dim=32, sliding_window=128)


def _gemma3() -> Any:
    from transformers import Gemma3TextConfig

    kinds = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
    # Its embeddings are scaled up: tied ones would only repeat the last token.
    untied = {**_COMMON, "tie_word_embeddings": False}
    return Gemma3TextConfig(**untied, head_dim=32, sliding_window=128, layer_types=kinds, query_pre_attn_scalar=32)


def _gpt_oss() -> Any:
    from transformers import GptOssConfig

    kinds = ["sliding_attention", "full_attention"] * 2
    return GptOssConfig(
        **{**_COMMON, "tie_word_embeddings": False},
        head_dim=32,
        sliding_window=128,
        layer_types=kinds,
        num_local_experts=4,
        num_experts_per_tok=2,
    )


def _deepseek_v2() -> Any:
    from transformers import DeepseekV2Config

    return DeepseekV2Config(
        **{**_COMMON, "num_key_value_heads": 4, "tie_word_embeddings": False},
        kv_lora_rank=512,  # with the 64 below the only size that vLLM's CPU kernel has
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        # vLLM's CPU build runs experts of this family in bfloat16 only, where ties decide: no layer has any.
        first_k_dense_replace=4,
    )


def _granite4() -> Any:
    from transformers import GraniteMoeHybridConfig

    return GraniteMoeHybridConfig(
        **_COMMON,
        layer_types=["mamba", "mamba", "mamba", "attention"],
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=256,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=32,
        mamba_n_groups=1,
        mamba_expand=2,
        mamba_chunk_size=64,
        attention_multiplier=0.18,
        position_embedding_type="rope",
    )


def _qwen3_next() -> Any:
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        **{**_COMMON, "tie_word_embeddings": False},
        head_dim=32,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "mistral": _mistral,
    "gemma3": _gemma3,
    "gpt-oss": _gpt_oss,
    "deepseek-v2": _deepseek_v2,
    "granite4": _granite4,
    "qwen3-next": _qwen3_next,
}


def family(name: str, cache: Path) -> Path:
    """The folder of the model, made in ``cache`` on first use. It has no tokenizer."""
    folder = cache / name
    if not (folder / "config.json").is_file():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as half:
            _make(FAMILIES[name](), Path(half) / name)
            (Path(half) / name).rename(folder)
    return folder


def _make(config: Any, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config).to(torch.float32).save_pretrained(folder)
