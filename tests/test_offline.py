"""DPO and KTO on a small voice of each family: what users rely on, with takes of the voice's own and no ASR."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from swaralign.params import DpoParams, KtoParams, LabelsParams, PairsParams, Params, SamplingParams, load_params
from swaralign.policy.base import TrainableVoice
from swaralign.preferences import LABEL_SCHEMA, PAIR_SCHEMA, Candidate, make_labels, make_pairs
from swaralign.training import common, offline
from swaralign.training.curves import curve_rows
from swaralign.training.dpo import pair_trainer, read_pairs, train_dpo
from swaralign.training.kto import label_trainer, loss_weights, micro_batches, read_labels, train_kto
from tests.voices import FAMILIES, PROMPTS, ROOT, LengthScorer, adapter, difference

MAX_FRAMES = 24
METHODS = ["dpo", "kto"]


@pytest.fixture(scope="module")
def params() -> Params:
    return load_params(ROOT / "recipes" / "demo.yaml")


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def new_voice(family: str, params: Params) -> TrainableVoice:
    return FAMILIES[family](params, MAX_FRAMES)


@pytest.fixture(scope="module")
def takes(family: str, params: Params) -> list[Candidate]:
    """Four takes of each prompt as the voice speaks them; the longer, the better."""
    voice = new_voice(family, params)
    texts = [prompt for prompt in PROMPTS for _ in range(4)]
    sampled = voice.rollout([prompt["text"] for prompt in texts], list(range(len(texts))),
                            SamplingParams(temperature=1.0, top_k=0, top_p=1.0))
    return [Candidate(row, prompt["id"], prompt["text"], 1.0, len(take.completion_ids) / 1000, False,
                      take.completion_ids.tolist())
            for row, (prompt, take) in enumerate(zip(texts, sampled, strict=True))]


@pytest.fixture(scope="module")
def rows(takes: list[Candidate]) -> dict[str, list[dict[str, Any]]]:
    """The preference sets of the takes."""
    pairs = make_pairs(takes, PairsParams(strategy="top_k_vs_bottom_k", k=2, min_margin=0.0))[0]
    labels = make_labels(takes, LabelsParams(top=0.5, bottom=0.49))[0]
    assert len(pairs) >= 8 and {row["label"] for row in labels} == {True, False}
    return {"dpo": pairs, "kto": labels}


def settings(method: str, params: Params, **changes: Any) -> Any:
    """Four pairs or takes an update, ten updates, unless changed; `schedule` merges in."""
    data = getattr(params, method).model_dump()
    data |= {"pairs_per_update" if method == "dpo" else "takes_per_update": 4, "micro_batch": 4}
    data["schedule"] |= {"updates": 10, "save_every": 5, "learning_rate": 2e-3} | changes.pop("schedule", {})
    data["validation"] |= {"every": 5, "prompts": 2}
    return (DpoParams if method == "dpo" else KtoParams).model_validate(data | changes)


def train(method: str, voice: TrainableVoice, rows: dict[str, Any], params: Params, folder: Path,
          **changes: Any) -> common.Training:
    scorer: Any = LengthScorer()
    run: Any = train_dpo if method == "dpo" else train_kto
    return run(voice, rows[method], PROMPTS, scorer, settings(method, params, **changes), params.runtime, folder)


def new_trainer(method: str, voice: TrainableVoice, rows: dict[str, Any], params: Params, folder: Path) -> Any:
    """The trainer before any update."""
    wanted = settings(method, params)
    if method == "dpo":
        return pair_trainer(voice, rows["dpo"], wanted, params.runtime, folder)
    return label_trainer(voice, micro_batches(rows["kto"], wanted), wanted, params.runtime, folder)


@pytest.fixture(scope="module", params=METHODS)
def trained(request: pytest.FixtureRequest, family: str, rows: dict[str, Any], params: Params,
            tmp_path_factory: pytest.TempPathFactory) -> tuple[str, common.Training]:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, train(request.param, new_voice(family, params), rows, params, folder)


@pytest.fixture(scope="module", params=METHODS)
def untrained(request: pytest.FixtureRequest, family: str, rows: dict[str, Any], params: Params,
              tmp_path_factory: pytest.TempPathFactory) -> tuple[str, TrainableVoice, Any]:
    voice = new_voice(family, params)
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, voice, new_trainer(request.param, voice, rows, params, folder)


def curve(result: common.Training) -> list[dict[str, Any]]:
    return curve_rows(result.trainer.state.log_history, result.columns)


def batch_of(trainer: Any) -> dict[str, Any]:
    """The first micro-batch of the run."""
    batch: dict[str, Any] = next(iter(trainer.get_train_dataloader()))
    return batch


def test_log_ratio_and_kl_are_0_before_the_first_update(trained: tuple[str, common.Training]) -> None:
    method, result = trained
    first, second = curve(result)[:2]
    assert first["chosen_reward"] == pytest.approx(0, abs=1e-6) == first["rejected_reward"]
    assert abs(second["chosen_reward"]) > 1e-4
    if method == "dpo":
        assert first["loss"] == pytest.approx(np.log(2), abs=1e-6)
    else:
        assert first["kl"] == pytest.approx(0, abs=1e-5)


def test_ten_updates_raise_the_margin(trained: tuple[str, common.Training]) -> None:
    margins = [row["margin"] for row in curve(trained[1]) if row["margin"] is not None]
    assert np.mean(margins[-3:]) > max(0.1, 3 * abs(np.mean(margins[:2])))
    assert np.isfinite([row["grad_norm"] for row in curve(trained[1])]).all()


def test_resumed_equals_uninterrupted(
    trained: tuple[str, common.Training], family: str, rows: dict[str, Any], params: Params, tmp_path: Path
) -> None:
    method, whole = trained
    shutil.copytree(str(whole.trainer.args.output_dir), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-10")
    (tmp_path / "run" / "validation" / "step-000010.parquet").unlink()
    resumed = train(method, new_voice(family, params), rows, params, tmp_path / "run")
    assert resumed.trainer.state.global_step == 10
    assert difference(adapter(whole), adapter(resumed)) < 1e-6
    assert [row["margin"] for row in curve(resumed)] == pytest.approx([row["margin"] for row in curve(whole)])
    assert resumed.validation.table().equals(whole.validation.table())


def test_what_a_training_writes(trained: tuple[str, common.Training], tmp_path: Path) -> None:
    method, result = trained
    common.write_training(tmp_path / "out", result, {"params": {}, "deps": {}})
    lines = (tmp_path / "out" / "curves.csv").read_text().splitlines()
    assert lines[0].split(",")[:3] == ["step", "loss", "margin"] and len(lines) == 11
    steps = [line.split(",")[0] for line in (tmp_path / "out" / "validation.csv").read_text().splitlines()]
    assert steps == ["step", "0", "5", "10"]
    facts = {"dpo": {"pairs"}, "kto": {"desirable", "undesirable", "dropped_takes", "desirable_weight"}}[method]
    assert facts <= set(result.facts) and f'"{facts.pop()}"' in (tmp_path / "out" / "manifest.json").read_text()


def test_masks_keep_the_policys_tokens_alone(untrained: tuple[str, TrainableVoice, Any]) -> None:
    method, voice, trainer = untrained
    batch, data = batch_of(trainer), trainer.train_dataset.select(trainer.plan[:4])
    columns = {"dpo": {"": ["chosen_ids", "rejected_ids"]},
               "kto": {"": ["completion_ids"], "KL_": ["KL_completion_ids"]}}[method]
    for prefix, names in columns.items():
        kept = batch[f"{prefix}input_ids"].masked_fill(batch[f"{prefix}completion_mask"] == 0, -1)
        expected = [np.asarray(row[name])[voice.policy_mask(np.asarray(row[name]))] for name in names for row in data]
        assert [ids[ids >= 0].tolist() for ids in kept] == [ids.tolist() for ids in expected]


def replayed(voice: TrainableVoice, text: str, completion: Sequence[int]) -> float:
    """Sum of the log-probs of a completion's policy tokens, from the model's plain states and its head."""
    prompt = voice.encode(text)
    ids = torch.tensor([[*prompt, *completion]])
    with torch.no_grad():
        states = voice.model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
        head = voice.model.get_output_embeddings()
        logits = states[len(prompt) - 1 : -1] @ head.weight.T + (0 if head.bias is None else head.bias)
    logps = torch.log_softmax(logits, -1).gather(1, torch.tensor(completion)[:, None])[:, 0]
    return float(logps[torch.from_numpy(voice.policy_mask(np.asarray(completion)))].sum())


def test_the_precomputed_reference_is_the_start_policy(
    untrained: tuple[str, TrainableVoice, Any], rows: dict[str, Any], family: str, params: Params
) -> None:
    method, _, trainer = untrained
    ids, logps = {"dpo": ("rejected_ids", "ref_rejected_logps"), "kto": ("completion_ids", "ref_logps")}[method]
    fresh, texts = new_voice(family, params), {tuple(row[ids]): row["text"] for row in rows[method]}
    for row in trainer.train_dataset.select(range(3)):
        assert row[logps] == pytest.approx(replayed(fresh, texts[tuple(row[ids])], row[ids]), abs=1e-3)


def test_tokens_of_the_environment_get_no_gradient(untrained: tuple[str, TrainableVoice, Any]) -> None:
    """The loss reaches the states that choose a policy token, and not one state more."""
    _, voice, trainer = untrained
    batch, outputs = batch_of(trainer), []
    trainer.model.train()
    handle = voice.model.base_model.register_forward_hook(lambda _, __, output: outputs.append(output))
    try:
        loss = trainer.compute_loss(trainer.model, batch)
    finally:
        handle.remove()
    states = [output.last_hidden_state for output in outputs if hasattr(output, "last_hidden_state")]
    (reached,) = [state for state in states if state.requires_grad]
    (gradient,) = torch.autograd.grad(loss, reached)
    chosen = batch["completion_mask"][:, 1:].bool()
    assert (gradient[:, :-1][~chosen] == 0).all() and (gradient[:, -1] == 0).all()
    assert (gradient[:, :-1][chosen].abs().sum(-1) > 0).float().mean() > 0.9


def test_accumulation_is_exact_for_pairs(
    family: str, rows: dict[str, Any], params: Params, tmp_path: Path
) -> None:
    """Eight pairs in one forward pass or in four of two make the same update."""
    norms = []
    for micro_batch in (8, 2):
        wanted = settings("dpo", params, pairs_per_update=8, micro_batch=micro_batch, schedule={"updates": 1})
        trainer = pair_trainer(new_voice(family, params), rows["dpo"], wanted, params.runtime, tmp_path / "run")
        trainer.train()
        norms.append(trainer.state.log_history[0]["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def labelled(counts: Sequence[int]) -> list[dict[str, Any]]:
    """Takes of prompts a, b, ... in the given numbers, labelled in turn."""
    names = [name for name, count in zip("abcdefghijklmnop", counts, strict=False) for _ in range(count)]
    return [{"id": name, "text": name, "label": number % 2 == 0, "number": number}
            for number, name in enumerate(names)]


@pytest.mark.parametrize(("counts", "micro_batch"), [
    ((4, 4, 4, 4), 4), ((4, 4, 4, 4), 8), ((8, 1, 1, 1, 1, 4), 16), ((3, 3, 3), 3), ((5, 2, 2, 1), 2), ((2,) * 16, 5),
])
def test_neighbours_are_of_different_prompts(params: Params, counts: Sequence[int], micro_batch: int) -> None:
    takes = labelled(counts)
    wanted = settings("kto", params, micro_batch=micro_batch, takes_per_update=micro_batch)
    batches = micro_batches(takes, wanted)
    assert {len(batch) for batch in batches} == {micro_batch} and len(batches) == len(takes) // micro_batch
    for batch in batches:
        assert all(take["id"] != before["id"] for take, before in zip(batch, batch[-1:] + batch[:-1], strict=True))
    numbers = [take["number"] for batch in batches for take in batch]
    assert len(set(numbers)) == len(numbers) and batches == micro_batches(takes, wanted)


def test_takes_that_kto_cannot_use_are_refused(params: Params) -> None:
    wanted = settings("kto", params)
    with pytest.raises(ValueError, match="prompt a has 4 of the 4 takes of a micro-batch"):
        micro_batches(labelled((7, 1)), wanted)
    with pytest.raises(ValueError, match="8 takes are desirable and 0 undesirable, KTO needs both"):
        micro_batches([take | {"label": True} for take in labelled((4, 4))], wanted)


def test_in_kto_each_prompt_meets_its_neighbours_completion(untrained: tuple[str, TrainableVoice, Any]) -> None:
    method, _, trainer = untrained
    if method != "kto":
        pytest.skip("DPO has no neighbours")
    for start in range(0, len(trainer.train_dataset), 4):
        batch = trainer.train_dataset[start : start + 4]
        assert batch["KL_completion_ids"] == batch["completion_ids"][-1:] + batch["completion_ids"][:-1]
        assert all(start <= index < start + 4 for index in trainer.plan[start : start + 4])


def test_weights_balance_the_two_kinds(params: Params) -> None:
    takes = [{"label": number < 3} for number in range(12)]
    assert loss_weights(takes, settings("kto", params)) == (2.0, pytest.approx(2 / 3))
    assert loss_weights(takes, settings("kto", params, desirable_weight=1.0)) == (1.0, pytest.approx(1 / 3))
    assert loss_weights(takes, settings("kto", params, undesirable_weight=1.0)) == (3.0, 1.0)
    assert loss_weights(takes, settings("kto", params, desirable_weight=1.0, undesirable_weight=1.5)) == (1.0, 1.5)


def test_the_plan_is_whole_epochs_that_last_the_run() -> None:
    plan = offline.plan_epochs(5, 13, seed=3)
    assert plan[:5] == [0, 1, 2, 3, 4] and sorted(plan[5:10]) == [0, 1, 2, 3, 4] and len(plan) == 13
    assert plan[5:10] != plan[:5] and offline.plan_epochs(5, 23, seed=3)[:13] == plan
    assert offline.plan_epochs(5, 23, seed=4)[5:] != offline.plan_epochs(5, 23, seed=3)[5:]


def test_too_few_rows_for_one_update_are_refused(params: Params, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([], schema=PAIR_SCHEMA), path)
    with pytest.raises(ValueError, match=r"holds 0 rows, dpo\.pairs_per_update is 4: not enough for one update"):
        read_pairs(path, settings("dpo", params))
    pq.write_table(pa.Table.from_pylist(labelled((2, 1)), schema=LABEL_SCHEMA), path)
    with pytest.raises(ValueError, match=r"holds 3 rows, kto\.takes_per_update is 4"):
        read_labels(path, settings("kto", params))
