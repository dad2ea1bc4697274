"""The hand-over to verl-omni: its launch of the same experiment, every value from params.yaml, on the pipeline's outs.

The split's rows, the speaker's embedding and the merged checkpoint are already in the form that it reads.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from swaralign.artifacts import write_text
from swaralign.params import GrpoParams, HttpParams, Params, Qwen3TtsRolloutParams, SamplingParams, load_params

LAUNCHER = "examples/grpo_trainer/qwen3_tts/run_qwen3_tts_grpo.sh"  # in a checkout of verl-omni
INPUTS = {"MODEL_PATH": "data/merge/checkpoint", "TRAIN_FILE": "data/split/train.parquet",
          "VAL_FILE": "data/split/validation.parquet", "SPK_EMBED_PATH": "data/speaker/embedding.json"}
TARGETS = "['q_proj','k_proj','v_proj','o_proj','gate_proj','up_proj','down_proj']"
ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
KWARGS = "reward.custom_reward_function.reward_kwargs"


def add_commands(commands: Any) -> None:
    """Add `export verl` to the command line's subparsers."""
    export = commands.add_parser("export", help="write the experiment for another trainer")
    verl = export.add_subparsers(required=True, metavar="verl").add_parser("verl", help="a launch of verl-omni")
    verl.add_argument("-o", "--out", type=Path, default=Path("verl_launch.sh"), help="the script to write")
    verl.add_argument("--scorer-url", help="of POST /score (default: the first of reward.http.urls)")
    verl.set_defaults(run=run_export_verl)


def run_export_verl(arguments: argparse.Namespace) -> int:
    """Write the launch script and say how to start it."""
    params = load_params()
    write_text(arguments.out, launch_script(params, Path.cwd(), arguments.scorer_url))
    print(f"VERL_OMNI=/path/to/verl-omni bash {arguments.out}")
    return 0


def launch_script(params: Params, root: Path, scorer_url: str | None = None) -> str:
    """A bash script that runs verl-omni's own launcher with the values of the params, on the outs under `root`.

    Raises ValueError if the voice is not Qwen3-TTS, or an out is not there yet.
    """
    if not isinstance(params.rollout, Qwen3TtsRolloutParams):
        raise ValueError(f"verl-omni's launcher is for rollout.family qwen3_tts, found {params.rollout.family!r}")
    if missing := [path for path in INPUTS.values() if not (root / path).exists()]:
        raise ValueError(f"{', '.join(missing)} not found; `dvc repro speaker` makes what is exported")
    scorer = scorer_url or next((f"{url}/score" for url in params.reward.http.urls), None)
    if scorer is None:
        raise ValueError("reward.http.urls is empty; name a scorer there, or by --scorer-url")
    named: dict[str, Any] = {name: root / path for name, path in INPUTS.items()}
    named |= {"SCORER_URL": scorer} | schedule(params.grpo)
    lines = [
        "#!/usr/bin/env bash",
        "# Written by `swaralign export verl` from params.yaml. VERL_OMNI: a checkout of verl-omni. A scorer must run:",
        "# `swaralign scorer serve`. Further overrides may follow on the command line.",
        "set -euo pipefail",
        *(f"export {name}={shlex.quote(str(value))}" for name, value in named.items()),
        'export OUTPUT_DIR="${OUTPUT_DIR:-outputs/qwen3_tts_grpo}"',
        f'exec bash "${{VERL_OMNI:?set it to a checkout of verl-omni}}/{LAUNCHER}" \\',
        *(f"    {shlex.quote(f'{key}={_text(value)}')} \\" for key, value in overrides(params, params.rollout)),
        '    "$@"',
    ]
    return "\n".join(lines) + "\n"


def schedule(grpo: GrpoParams) -> dict[str, int]:
    """What the launcher takes from the environment. It counts rollout batches, we count updates."""
    batches = grpo.iterations
    return {
        "NUM_GPUS": grpo.num_processes,
        "SEED": grpo.seed,
        "TOTAL_TRAINING_STEPS": grpo.schedule.updates // batches,
        "TEST_FREQ": max(1, grpo.validation.every // batches) if grpo.validation.prompts else -1,
        "SAVE_FREQ": grpo.schedule.save_every // batches,
    }


def overrides(params: Params, rollout: Qwen3TtsRolloutParams) -> Iterator[tuple[str, Any]]:
    """Hydra overrides in the launcher's names; `++` replaces a key that it adds itself."""
    grpo = params.grpo
    yield "data.train_batch_size", grpo.prompts_per_update
    yield "data.train_max_samples", params.split.expected_train
    yield "data.max_response_length", rollout.max_frames
    yield f"{MODEL}.enable_gradient_checkpointing", grpo.gradient_checkpointing
    yield f"++{MODEL}.override_config.tts_language", rollout.language.capitalize()
    yield from _lora(grpo)
    yield from _loss(grpo)
    yield f"{ROLLOUT}.n", grpo.samples_per_prompt
    yield from _sampling(ROLLOUT, grpo.sampling)
    yield from _sampling(f"{ROLLOUT}.val_kwargs", grpo.validation.sampling)
    yield from _scorer(params.reward.http)
    yield "trainer.max_actor_ckpt_to_keep", _kept(grpo)
    if grpo.validation.prompts:
        yield "data.val_max_samples", grpo.validation.prompts
    else:
        yield "trainer.val_before_train", False
        yield "trainer.log_val_generations", 0


def _lora(grpo: GrpoParams) -> Iterator[tuple[str, Any]]:
    if grpo.trainable == "lora":
        yield f"{MODEL}.lora_rank", grpo.lora.r
        yield f"{MODEL}.lora_alpha", grpo.lora.alpha
        yield f"{MODEL}.lora_dtype", "float32"
        yield f"{MODEL}.target_modules", TARGETS
        yield f"{MODEL}.lora.merge", True


def _loss(grpo: GrpoParams) -> Iterator[tuple[str, Any]]:
    yield "algorithm.norm_adv_by_std_in_grpo", grpo.scale_by_std
    yield f"{ACTOR}.ppo_mini_batch_size", grpo.prompts_per_update
    yield f"{ACTOR}.ppo_epochs", grpo.iterations
    yield f"{ACTOR}.use_kl_loss", grpo.beta > 0
    yield f"{ACTOR}.kl_loss_coef", grpo.beta
    yield f"{ACTOR}.kl_loss_type", "k3"
    yield f"{ACTOR}.clip_ratio_low", grpo.epsilon
    yield f"{ACTOR}.clip_ratio_high", grpo.epsilon
    yield f"{ACTOR}.loss_agg_mode", {"token": "token-mean", "sequence": "seq-mean-token-mean"}[grpo.loss_aggregation]
    yield f"{ACTOR}.optim.lr", grpo.schedule.learning_rate
    yield f"{ACTOR}.optim.lr_warmup_steps", -(-grpo.schedule.warmup_updates // grpo.iterations)  # of rollout batches
    yield f"{ACTOR}.optim.weight_decay", grpo.schedule.weight_decay
    yield f"{ACTOR}.optim.clip_grad", grpo.schedule.max_grad_norm


def _sampling(where: str, sampling: SamplingParams) -> Iterator[tuple[str, Any]]:
    yield f"{where}.temperature", sampling.temperature
    yield f"{where}.top_p", sampling.top_p
    yield f"{where}.top_k", sampling.top_k or -1


def _scorer(http: HttpParams) -> Iterator[tuple[str, Any]]:
    yield f"++{KWARGS}.timeout", http.timeout_s
    yield f"++{KWARGS}.max_retries", http.retries
    yield f"++{KWARGS}.retry_backoff", http.backoff_s


def _kept(grpo: GrpoParams) -> int:
    """Checkpoints that it keeps, the newest ones: it knows no other rule, so those of `keep_every` need all of them."""
    every = grpo.schedule.updates // grpo.schedule.save_every + 1
    return every if grpo.schedule.keep_every else grpo.schedule.keep_checkpoints


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
