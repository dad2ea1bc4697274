"""MLX adapter -> PEFT adapter -> merged checkpoint: by hand on tiny matrices, by PEFT on the demo voice."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from swaralign.artifacts import sha256_file, sha256_tree
from swaralign.merge import build_merge, check_topology, merge_weights, product, write_peft_adapter
from swaralign.mlx_lora import read_adapter
from swaralign.params import AssetsParams, LocalAsset, MergeParams, load_params

ROOT = Path(__file__).resolve().parent.parent
Q, K = "talker.model.layers.0.self_attn.q_proj", "talker.model.layers.0.self_attn.k_proj"
DOWN = "talker.code_predictor.model.layers.0.mlp.down_proj"
SIZES = {Q: (4, 4), K: (3, 4), DOWN: (4, 6)}  # (out, in) of each weight
RANK = 2
SCALE = 0.5
MERGED_DEMO = "bd7bbfc33b3e798cd2e9c609feb6d751a09bb68808de7db58bb669ae807764fe"


def merge_params(**changes: Any) -> MergeParams:
    values: dict[str, Any] = {"orientation": "mlx_lm", "scale": None, "expected_modules": len(SIZES)}
    return MergeParams(**(values | changes))


def write_base(folder: Path, weights: dict[str, Tensor], config: dict[str, Any] | None = None) -> Path:
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt", "made": "here"})
    (folder / "config.json").write_text(json.dumps(config or {"talker_config": {}}))
    return folder


def write_adapter(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any] | None) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "adapters.safetensors")
    if config is not None:
        (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def recorded(**changes: Any) -> dict[str, Any]:
    return {"fine_tune_type": "lora", "lora_parameters": {"rank": RANK, "scale": SCALE, "dropout": 0.0}} | changes


def mlx_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for module, (out_size, in_size) in SIZES.items():
        tensors[f"{module}.lora_a"] = torch.randn(in_size, RANK, generator=generator)
        tensors[f"{module}.lora_b"] = torch.randn(RANK, out_size, generator=generator)
    return tensors


@pytest.fixture
def base(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(2)
    weights = {f"{module}.weight": torch.randn(size, generator=generator) for module, size in SIZES.items()}
    weights |= {"talker.codec_head.weight": torch.ones(5, 4), "talker.model.norm.weight": torch.ones(4)}
    return write_base(tmp_path / "base", weights)


# The merge, by hand

Matrix = list[list[float]]


def merged_by_hand(tmp_path: Path, weight: Tensor, a: Matrix, b: Matrix, orientation: str) -> Tensor:
    base = write_base(tmp_path / "base", {f"{Q}.weight": weight})
    tensors = {f"{Q}.lora_a": torch.tensor(a), f"{Q}.lora_b": torch.tensor(b)}
    adapter = write_adapter(tmp_path / "adapter", tensors, None)
    params = merge_params(orientation=orientation, scale=SCALE, expected_modules=1)
    merge_weights(base / "model.safetensors", read_adapter(adapter, base, params), tmp_path / "merged.safetensors")
    return load_file(tmp_path / "merged.safetensors")[f"{Q}.weight"]


@pytest.mark.parametrize(("orientation", "a", "b"), [
    ("mlx_lm", [[1.0], [2.0]], [[3.0, 5.0]]),
    ("peft", [[1.0, 2.0]], [[3.0], [5.0]]),
])
def test_a_square_layer_merged_by_hand(tmp_path: Path, orientation: str, a: Matrix, b: Matrix) -> None:
    """W + 1/2 (A B)^T = [[1, 2], [3, 4]] + 1/2 [[3, 6], [5, 10]]; without the transpose it would be another matrix."""
    merged = merged_by_hand(tmp_path, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), a, b, orientation)
    assert merged.tolist() == [[2.5, 5.0], [5.5, 9.0]]


def test_the_sum_is_rounded_once(tmp_path: Path) -> None:
    """Steps of bfloat16 are 2 at 256: 257.002 rounds to 258; were the 1.002 rounded first, 257 would round to 256."""
    weight = torch.full((2, 2), 256.0, dtype=torch.bfloat16)
    merged = merged_by_hand(tmp_path, weight, [[2.004], [0.0]], [[1.0, 0.0]], "mlx_lm")
    assert merged.dtype == torch.bfloat16
    assert merged.tolist() == [[258.0, 256.0], [256.0, 256.0]]


def test_a_product_is_summed_in_order_by_fused_steps() -> None:
    """1 + 2^-24 + 2^-24 is 1 in that order and 1 + 2^-23 in the other; the square of 1 + 2^-12, less 1, is exact."""
    tiny, near = 2.0**-24, 1 + 2.0**-12
    assert product(torch.ones(1, 3), torch.tensor([[1.0], [tiny], [tiny]])).item() == 1.0
    assert product(torch.ones(1, 3), torch.tensor([[tiny], [tiny], [1.0]])).item() == 1 + 2 * tiny
    assert product(torch.tensor([[-1.0, near]]), torch.tensor([[1.0], [near]])).item() == 2.0**-11 + tiny


def test_an_overflow_of_the_base_dtype_is_named(tmp_path: Path) -> None:
    weight = torch.full((2, 2), 60_000.0, dtype=torch.float16)
    with pytest.raises(ValueError, match=rf"{Q}: not finite in torch\.float16 once merged; is scale 0\.5 right"):
        merged_by_hand(tmp_path, weight, [[2.0], [0.0]], [[60_000.0, 0.0]], "mlx_lm")


def test_all_but_the_adapted_weights_stays_byte_for_byte(tmp_path: Path, base: Path) -> None:
    lora = read_adapter(write_adapter(tmp_path / "adapter", mlx_tensors(), recorded()), base, merge_params())
    merge_weights(base / "model.safetensors", lora, tmp_path / "merged.safetensors")
    before, after = (base / "model.safetensors").read_bytes(), (tmp_path / "merged.safetensors").read_bytes()
    header = 8 + int.from_bytes(before[:8], "little")
    assert after[:header] == before[:header] and len(after) == len(before)
    with safe_open(tmp_path / "merged.safetensors", framework="pt") as merged:
        assert merged.metadata() == {"format": "pt", "made": "here"}
    old, new = load_file(base / "model.safetensors"), load_file(tmp_path / "merged.safetensors")
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert changed == {f"{module}.weight" for module in SIZES}


# The scale


def test_the_recorded_scale_is_used(tmp_path: Path, base: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", mlx_tensors(), recorded())
    assert read_adapter(adapter, base, merge_params()).scale == SCALE
    assert read_adapter(adapter, base, merge_params(scale=SCALE)).scale == SCALE


@pytest.mark.parametrize("config", [None, {"fine_tune_type": "lora"}, recorded(lora_parameters={"rank": RANK})])
def test_an_adapter_without_a_scale_needs_one_in_the_params(
    tmp_path: Path, base: Path, config: dict[str, Any] | None
) -> None:
    adapter = write_adapter(tmp_path / "adapter", mlx_tensors(), config)
    with pytest.raises(ValueError, match=r"no scale: adapter_config\.json records none .* set merge\.scale"):
        read_adapter(adapter, base, merge_params())
    assert read_adapter(adapter, base, merge_params(scale=20.0)).scale == 20.0


def test_two_scales_that_differ_are_named(tmp_path: Path, base: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", mlx_tensors(), recorded())
    with pytest.raises(ValueError, match=r"merge\.scale is 2\.0, but adapter_config\.json records .*scale 0\.5"):
        read_adapter(adapter, base, merge_params(scale=2.0))


# Adapters and bases that cannot be merged


def drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__setitem__(name, tensor)


@pytest.mark.parametrize(("spoil", "message"), [
    (drop(f"{Q}.lora_b"), rf"lacks tensors whose partner it holds: {Q}\.lora_b"),
    (drop(f"{K}.lora_a"), rf"lacks tensors whose partner it holds: {K}\.lora_a"),
    (put(f"{Q}.lora_c", torch.ones(1)), rf"unknown tensors: {Q}\.lora_c; only lora_a and lora_b"),
    (put("model.layers.0.self_attn.q_proj.lora_a", torch.ones(1)), r"unknown tensors: model\.layers\.0"),
    (put("talker.codec_head.lora_a", torch.ones(4, 2)), r"unknown tensors: talker\.codec_head\.lora_a.*may be tied"),
    (put(f"{Q}.m", torch.ones(4)), rf"the adapter is DoRA, it holds {Q}\.m"),
    (put(f"{K}.lora_a", torch.full((4, 2), torch.nan)), rf"{K}\.lora_a holds values that are not finite"),
    (put(f"{K}.lora_b", torch.full((2, 3), torch.inf)), rf"{K}\.lora_b holds values that are not finite"),
    (put(f"{K}.lora_a", torch.ones(4, 2, dtype=torch.int32)), rf"{K}\.lora_a is torch\.int32, not a float"),
    (put(f"{K}.lora_b", torch.ones(2, 4)),
     rf"{K}: orientation mlx_lm expects .* \(4, r\) and \(r, 3\), found \(4, 2\) and \(2, 4\) .*adapter's own base"),
    (put(f"{K}.lora_b", torch.ones(1, 3)), r"found \(4, 2\) and \(1, 3\) over a weight of \(3, 4\)"),
    (put(f"{K}.lora_b", torch.ones(6)), r"found \(4, 2\) and \(6,\) over a weight of \(3, 4\)"),
], ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_a_spoilt_adapter_is_refused_by_name(
    tmp_path: Path, base: Path, spoil: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    tensors = mlx_tensors()
    spoil(tensors)
    with pytest.raises(ValueError, match=message):
        read_adapter(write_adapter(tmp_path / "adapter", tensors, recorded()), base, merge_params())


def test_missing_modules_are_counted_and_named(tmp_path: Path, base: Path) -> None:
    tensors = {name: tensor for name, tensor in mlx_tensors().items() if not name.startswith(DOWN)}
    with pytest.raises(ValueError, match=rf"merge\.expected_modules: expected 3, found 2 adapted modules.*: {DOWN}"):
        read_adapter(write_adapter(tmp_path / "adapter", tensors, recorded()), base, merge_params())


def test_modules_of_another_base_are_named(tmp_path: Path, base: Path) -> None:
    other = Q.replace("layers.0", "layers.7")
    tensors = mlx_tensors() | {f"{other}.lora_a": torch.ones(4, 2), f"{other}.lora_b": torch.ones(2, 4)}
    with pytest.raises(ValueError, match=rf"for another base: this one does not have the modules {other}"):
        read_adapter(write_adapter(tmp_path / "adapter", tensors, recorded()), base, merge_params(expected_modules=4))


@pytest.mark.parametrize(("right", "wrong"), [("mlx_lm", "peft"), ("peft", "mlx_lm")])
def test_the_wrong_orientation_is_found_even_on_square_layers(tmp_path: Path, right: str, wrong: str) -> None:
    base = write_base(tmp_path / "base", {f"{Q}.weight": torch.zeros(4, 4)})
    shapes = {"mlx_lm": ((4, RANK), (RANK, 4)), "peft": ((RANK, 4), (4, RANK))}[right]
    tensors = {f"{Q}.lora_a": torch.ones(shapes[0]), f"{Q}.lora_b": torch.ones(shapes[1])}
    adapter = write_adapter(tmp_path / "adapter", tensors, recorded())
    assert read_adapter(adapter, base, merge_params(orientation=right, expected_modules=1)).rank == RANK
    with pytest.raises(ValueError, match=rf"orientation {wrong} expects .*; set merge\.orientation to {right}"):
        read_adapter(adapter, base, merge_params(orientation=wrong, expected_modules=1))


def test_a_rank_that_hides_the_orientation_is_refused(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", {f"{Q}.weight": torch.zeros(4, 4)})
    tensors = {f"{Q}.lora_a": torch.ones(4, 4), f"{Q}.lora_b": torch.ones(4, 4)}
    with pytest.raises(ValueError, match=rf"{Q}: rank 4 is not low, found \(4, 4\) and \(4, 4\)"):
        read_adapter(write_adapter(tmp_path / "adapter", tensors, recorded()), base, merge_params(expected_modules=1))


def test_ranks_that_differ(tmp_path: Path, base: Path) -> None:
    tensors = mlx_tensors() | {f"{K}.lora_a": torch.ones(4, 1), f"{K}.lora_b": torch.ones(1, 3)}
    with pytest.raises(ValueError, match=r"all modules must share one rank; .* has 2, .*k_proj has 1"):
        read_adapter(write_adapter(tmp_path / "adapter", tensors, recorded()), base, merge_params())


@pytest.mark.parametrize(("config", "message"), [
    (recorded(fine_tune_type="dora"), "fine_tune_type is 'dora'; only plain 'lora'"),
    (recorded(use_dora=True), "fine_tune_type is 'dora'"),
    (recorded(fine_tune_type="full"), "fine_tune_type is 'full'"),
    (recorded(quantization={"bits": 4}), r"quantization is \{\"bits\": 4\}, so the base is quantised"),
    (recorded(lora_parameters={"rank": 2, "scale": 1.0, "alpha": 16}), "unknown lora_parameters alpha; known are rank"),
    (recorded(lora_parameters=None), "lora_parameters must be an object, found None"),
    (recorded(lora_parameters={"rank": 8, "scale": 1.0}), "records lora_parameters.rank 8, the tensors have rank 2"),
    (recorded(lora_parameters={"rank": 2, "scale": "2"}), "scale is '2', not a positive number"),
    (recorded(lora_parameters={"rank": 2, "scale": 0}), "scale is 0, not a positive number"),
    (recorded(lora_parameters={"rank": 2, "scale": float("nan")}), "scale is nan, not a positive number"),
])
def test_a_config_that_cannot_be_merged(tmp_path: Path, base: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_adapter(write_adapter(tmp_path / "adapter", mlx_tensors(), config), base, merge_params())


@pytest.mark.parametrize("config", [
    {"quantization": {"bits": 4}},
    {"quantization_config": {"bits": 8}},
    {"talker_config": {"quantization": {"bits": 4}}},
])
def test_a_base_whose_config_says_quantised(tmp_path: Path, config: dict[str, Any]) -> None:
    base = write_base(tmp_path / "base", {f"{Q}.weight": torch.zeros(4, 4)}, config)
    with pytest.raises(ValueError, match=r"config\.json: quantization.* so the base is quantised"):
        read_adapter(write_adapter(tmp_path / "adapter", mlx_tensors(), recorded()), base, merge_params())


def test_a_base_of_packed_integers(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", {f"{Q}.weight": torch.zeros(4, 1, dtype=torch.uint32)})
    with pytest.raises(ValueError, match=rf"{Q}\.weight is U32, so the base is quantised"):
        read_adapter(write_adapter(tmp_path / "adapter", mlx_tensors(), recorded()), base, merge_params())


def test_files_that_are_missing_or_damaged(tmp_path: Path, base: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", mlx_tensors(), recorded())
    (adapter / "adapters.safetensors").write_bytes(b"not tensors")
    with pytest.raises(ValueError, match=r"adapters\.safetensors is not a safetensors file"):
        read_adapter(adapter, base, merge_params())
    (adapter / "adapters.safetensors").unlink()
    with pytest.raises(ValueError, match=r"adapters\.safetensors does not exist"):
        read_adapter(adapter, base, merge_params())
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"adapter_config\.json is not valid JSON"):
        read_adapter(adapter, base, merge_params())


# What is written


def assets_for(base: Path, adapter: Path) -> AssetsParams:
    assets = load_params(ROOT / "params.yaml").assets
    pinned = {
        name: LocalAsset(source="local", path=str(path), id=f"house/{name}", revision="r1", files=sha256_tree(path))
        for name, path in (("base", base), ("adapter", adapter))
    }
    return assets.model_copy(update=pinned)


def test_the_peft_adapter_by_its_definition(tmp_path: Path, base: Path) -> None:
    mlx = mlx_tensors()
    lora = read_adapter(write_adapter(tmp_path / "adapter", mlx, recorded()), base, merge_params())
    write_peft_adapter(lora, "house/base", tmp_path / "peft")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["lora_alpha"] / config["r"] == SCALE and config["r"] == RANK
    assert config["base_model_name_or_path"] == "house/base"
    assert config["target_modules"] == sorted(SIZES)
    tensors = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert set(tensors) == {f"base_model.model.{module}.lora_{x}.weight" for module in SIZES for x in "AB"}
    assert torch.equal(tensors[f"base_model.model.{K}.lora_A.weight"], mlx[f"{K}.lora_a"].T)
    assert torch.equal(tensors[f"base_model.model.{K}.lora_B.weight"], mlx[f"{K}.lora_b"].T)


def test_the_out_has_every_file_and_every_hash_and_is_reproducible(tmp_path: Path) -> None:
    params = load_params(ROOT / "recipes" / "demo.yaml")
    base, adapter = ROOT / params.assets.base.path, ROOT / params.assets.adapter.path
    threads = torch.get_num_threads()
    for name, count in (("one", 1), ("two", 2)):
        torch.set_num_threads(count)
        build_merge(base, adapter, params.assets, params.merge, tmp_path / name)
    torch.set_num_threads(threads)
    out = tmp_path / "one"
    assert sha256_tree(out) == sha256_tree(tmp_path / "two")
    assert sorted(sha256_tree(out / "checkpoint")) == sorted(params.assets.base.files)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["base"]["files"]["model.safetensors"] == sha256_file(base / "model.safetensors")
    assert manifest["adapter"]["files"] == sha256_tree(adapter)
    assert manifest["peft_adapter"] == sha256_tree(out / "adapter")
    assert manifest["checkpoint"] == sha256_tree(out / "checkpoint")
    kept = {key: manifest[key] for key in ("orientation", "rank", "scale", "alpha", "modules", "tensors")}
    assert kept == {"orientation": "mlx_lm", "rank": 8, "scale": 2.0, "alpha": 16.0, "modules": 56, "tensors": 112}
    assert manifest["checkpoint"]["model.safetensors"] == MERGED_DEMO, "the same on every machine"


# The base against its config, before a weight is read


@pytest.mark.parametrize(("spoil", "message"), [
    (drop("talker.codec_head.weight"), r"talker\.codec_head\.weight missing, expected \(1152, 256\)"),
    (put("talker.codec_head.weight", torch.ones(7, 256)), r"codec_head\.weight \(7, 256\), expected \(1152, 256\)"),
    (put("talker.model.layers.0.self_attn.q_proj.lora_A.weight", torch.ones(8, 256)),
     r"q_proj\.lora_A\.weight \(8, 256\), expected none"),
])
def test_a_base_that_is_not_what_its_config_says(
    tmp_path: Path, spoil: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    base = Path(shutil.copytree(ROOT / "data/demo/base", tmp_path / "base"))
    check_topology(base)
    weights = load_file(base / "model.safetensors")
    spoil(weights)
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"does not hold what its config\.json describes: .*{message}"):
        check_topology(base)


# Merged = adapter-on, on the demo voice


def talker_logits(model: Any) -> dict[str, Tensor]:
    """Codec-0 logits, and states of the code predictor, over fixed random inputs, in double precision."""
    generator = torch.Generator().manual_seed(5)
    talker = model.double().talker
    outputs = {}
    with torch.no_grad():
        inputs = torch.randn(2, 12, talker.config.hidden_size, generator=generator, dtype=torch.float64)
        outputs["codec_0"] = talker.codec_head(talker.model(inputs_embeds=inputs, use_cache=False).last_hidden_state)
        predictor = talker.code_predictor.model
        inputs = torch.randn(2, 12, predictor.config.hidden_size, generator=generator, dtype=torch.float64)
        outputs["predictor"] = predictor(inputs_embeds=inputs, use_cache=False).last_hidden_state
    return outputs


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
    return {name: float((one[name] - other[name]).abs().max()) for name in one}


def in_float32(voice: Path, folder: Path) -> Path:
    """A copy of a voice with all its weights in float32, so that no rounding of the base's dtype hides a fault."""
    shutil.copytree(voice, folder)
    weights = {name: tensor.float() for name, tensor in load_file(voice / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_the_merged_voice_equals_the_base_with_the_adapter_on(tmp_path: Path) -> None:
    from peft import PeftModel, get_peft_model_state_dict

    from swaralign.official import Qwen3TTSForConditionalGeneration

    params = load_params(ROOT / "params.yaml")
    base, adapter = in_float32(ROOT / "data/demo/base", tmp_path / "base"), ROOT / "data/demo/sft_adapter_mlx"
    build_merge(base, adapter, assets_for(base, adapter), params.merge, tmp_path / "merge")
    load = partial(Qwen3TTSForConditionalGeneration.from_pretrained, dtype=torch.float32)
    merged, model = load(tmp_path / "merge/checkpoint").eval(), load(base).eval()
    off = talker_logits(model)
    peft_model = PeftModel.from_pretrained(model, tmp_path / "merge/adapter").eval()
    stored = load_file(tmp_path / "merge/adapter/adapter_model.safetensors")
    loaded = get_peft_model_state_dict(peft_model, save_embedding_layers=False)
    assert len(stored) == 2 * params.merge.expected_modules
    assert set(loaded) == set(stored) and all(torch.equal(loaded[name], stored[name]) for name in stored)

    on = talker_logits(model)
    assert all(difference < 1e-5 for difference in largest_difference(talker_logits(merged), on).values())
    assert all(difference > 1e-2 for difference in largest_difference(off, on).values())
