"""A checkpoint of the published 0.6B shapes with random weights, in the real file layout, and an adapter for it.

    python -m benchmarks.full_size OUT [--seed 0]

Writes OUT/base (1.8 GB, bfloat16) and OUT/adapter (MLX, rank 8, over all 231 projections, in PEFT's orientation as
the published one is). The tokenizer and the codec's encoder are the micro voice's, its decoder has the published sizes:
what is measured with it is size, not speech.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from qwen_tts.core.tokenizer_12hz.modeling_qwen3_tts_tokenizer_v2 import Qwen3TTSTokenizerV2Model
from safetensors import safe_open
from safetensors.torch import save_file

from swaralign.mlx_lora import ADAPTER_CONFIG, ADAPTER_FILE, PROJECTION, WEIGHTS_FILE
from swaralign.official import Qwen3TTSForConditionalGeneration

MICRO = Path("data/demo/base")
LAYERS = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
          "head_dim": 128}
TALKER = {**LAYERS, "num_hidden_layers": 28, "text_hidden_size": 2048, "text_vocab_size": 151936, "vocab_size": 3072,
          "max_position_embeddings": 32768, "codec_pad_id": 2148, "codec_bos_id": 2149, "codec_eos_token_id": 2150,
          "codec_think_id": 2154, "codec_nothink_id": 2155, "codec_think_bos_id": 2156, "codec_think_eos_id": 2157,
          "codec_language_id": {"english": 2050},
          "rope_scaling": {"interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}}
PREDICTOR = {**LAYERS, "num_hidden_layers": 5, "vocab_size": 2048, "max_position_embeddings": 65536,
             "layer_types": ["full_attention"] * 5}
SPEAKER = {"enc_dim": 1024, "enc_channels": [512, 512, 512, 512, 1536], "enc_attention_channels": 128,
           "enc_res2net_scale": 8, "enc_se_channels": 128}
CODEC = {"codebook_dim": 512, "codebook_size": 2048, "decoder_dim": 1536, "head_dim": 64, "hidden_size": 512,
         "intermediate_size": 1024, "latent_dim": 1024, "layer_scale_initial_scale": 0.01, "num_attention_heads": 16,
         "num_key_value_heads": 16, "num_hidden_layers": 8}
RANK, SCALE = 8, 2.0


def full_config() -> dict[str, Any]:
    """The config of the micro voice with the published sizes, 16 codebooks of 2,048 as there."""
    config: dict[str, Any] = json.loads((MICRO / "config.json").read_text(encoding="utf-8"))
    config["tts_model_size"] = "0b6"
    config["talker_config"] |= TALKER
    config["talker_config"]["code_predictor_config"] |= PREDICTOR
    config["speaker_encoder_config"] |= SPEAKER
    return config


def write_base(folder: Path, seed: int) -> None:
    """Write the checkpoint; weights are normal with a deviation of 0.02, norms are ones."""
    shutil.copytree(MICRO, folder)
    (folder / "config.json").write_text(json.dumps(full_config(), indent=2), encoding="utf-8")
    config = Qwen3TTSForConditionalGeneration.config_class.from_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Qwen3TTSForConditionalGeneration(config).state_dict().items()}
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        drawn = torch.ones(shape) if "norm" in name else 0.02 * torch.randn(shape, generator=generator)
        weights[name] = drawn.to(torch.bfloat16)
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    write_codec(folder / "speech_tokenizer", seed)


def write_codec(folder: Path, seed: int) -> None:
    """Write a codec over the micro voice's in `folder`, its decoder of the published sizes: as its class draws it, with
    normal codebooks."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["decoder_config"] |= CODEC
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    torch.manual_seed(seed)
    model = Qwen3TTSTokenizerV2Model(Qwen3TTSTokenizerV2Model.config_class.from_pretrained(folder))
    weights = {name: (torch.randn_like(tensor) if name.endswith("embedding_sum") else tensor).half().contiguous()
               for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def speaker(base: Path) -> list[float]:
    """A made-up speaker embedding of the base's width."""
    width = json.loads((base / "config.json").read_text(encoding="utf-8"))["talker_config"]["hidden_size"]
    drawn: list[float] = (torch.randn(width, generator=torch.Generator().manual_seed(5)) * 0.15).tolist()
    return drawn


def prompts(count: int) -> list[dict[str, str]]:
    """So many prompts of middling length."""
    return [{"id": str(n), "text": f"Sentence number {n} of this benchmark is neither long nor short."}
            for n in range(count)]


def write_adapter(folder: Path, base: Path, seed: int) -> int:
    """Write an MLX adapter over every projection of the base; returns how many there are."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    factors = {}
    with safe_open(base / WEIGHTS_FILE, framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118 (a safetensors handle is not a mapping)
            module = name.removesuffix(".weight")
            if PROJECTION.fullmatch(module):
                rows, columns = weights.get_slice(name).get_shape()
                factors[f"{module}.lora_a"] = 0.02 * torch.randn(RANK, columns, generator=generator)
                factors[f"{module}.lora_b"] = 0.02 * torch.randn(rows, RANK, generator=generator)
    save_file(factors, folder / ADAPTER_FILE)
    config = {"fine_tune_type": "lora", "lora_parameters": {"rank": RANK, "scale": SCALE, "dropout": 0.0}}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config), encoding="utf-8")
    return len(factors) // 2


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_base(args.out / "base", args.seed)
    print(f"{write_adapter(args.out / 'adapter', args.out / 'base', args.seed + 1)} adapted modules")


if __name__ == "__main__":
    main()
