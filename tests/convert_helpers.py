"""Small Hugging Face checkpoints made of random tensors, without transformers, and ways to look at converted ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from luspo_megatron.weights.architecture import parse_architecture
from luspo_megatron.weights.table import WeightTable

SIZES = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
         "intermediate_size": 96, "vocab_size": 301, "rms_norm_eps": 1e-6, "max_position_embeddings": 256}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True}
NAMES = {"dense": "Qwen3", "moe": "Qwen3Moe", "qwen2": "Qwen2", "llama": "Llama", "mistral": "Mistral"}
OWN: dict[str, dict[str, Any]] = {"moe": MOE, "mistral": {"sliding_window": None}}


def config_json(kind: str, *, tied: bool = False, dtype: str = "float32", **changes: Any) -> dict[str, Any]:
    return {"architectures": [f"{NAMES[kind]}ForCausalLM"], "dtype": dtype,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "tie_word_embeddings": tied, **SIZES,
            **OWN.get(kind, {}), **changes}


def table_of(folder: Path) -> WeightTable:
    return WeightTable(parse_architecture(json.loads((folder / "config.json").read_text())))


def make_hf(folder: Path, kind: str, *, tied: bool = False, dtype: str = "float32", files: int = 1, seed: int = 0,
            **changes: Any) -> Path:
    """Random tensors (all different) in `files` shards with an index, or one file without."""
    folder.mkdir(parents=True)
    config = config_json(kind, tied=tied, dtype=dtype, **changes)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3], "pad_token_id": 0}))
    vocabulary = {f"t{i}": i for i in range(config["vocab_size"])}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator).to(getattr(torch, dtype))
               for name, shape in table_of(folder).hf_shapes.items()}
    write_tensors(folder, tensors, files)
    return folder


def write_tensors(folder: Path, tensors: dict[str, torch.Tensor], files: int = 1) -> None:
    for old in folder.glob("model*"):
        old.unlink()
    if files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map = {}
    for i in range(files):
        file = f"model-{i + 1:05d}-of-{files:05d}.safetensors"
        part = {name: tensors[name] for name in names[i::files]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """As the safetensors library reads them."""
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def dist_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a torch_dist folder, whole, as torch.distributed.checkpoint's own loader reads it."""
    import torch.distributed.checkpoint as dcp

    reader = dcp.FileSystemReader(str(folder))
    state: dict[str, Any] = {
        key: torch.zeros(value.size, dtype=value.properties.dtype)
        for key, value in reader.read_metadata().state_dict_metadata.items() if hasattr(value, "size")}
    dcp.load(state, storage_reader=dcp.FileSystemReader(str(folder)), no_dist=True)
    return state


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and a[name].shape == b[name].shape, name
        assert torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)), name


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
