"""Universal checkpoints, and what DeepSpeed's own tools make of the same files."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import pytest
import torch

from dynadapt import offline
from dynadapt.errors import Refused
from tests import _ranks
from tests.live import jobs
from tests.offline._made import save_deepspeed

if TYPE_CHECKING:
    from pathlib import Path

    from tests._ranks import Pool

UNIVERSAL = {"checkpoint": {"load_universal": True}}


def _held(engine: Any) -> dict[str, torch.Tensor]:
    """Every master and moment by DeepSpeed's own functions, frozen weights by the module's."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if engine.zero_optimization_stage() == 3:
        return jobs.zero_tensors(engine)
    engine.optimizer._hp_optimizer_states_linked = False
    engine.optimizer._lazy_init_hp_params_optimizer_state()  # what a step would do
    found = {}
    for name, param in engine.module.named_parameters():
        if not param.requires_grad:
            found[f"{name}/param"] = param.detach().float().clone()
            continue
        found[f"{name}/param"] = safe_get_full_fp32_param(param).clone()
        for slot in ("exp_avg", "exp_avg_sq"):
            found[f"{name}/{slot}"] = safe_get_full_optimizer_state(param, slot).clone()
    return found


def _load(
    rank: int, world: int, kind: str, where: str, steps: int, seed: int, universal: bool
) -> dict[str, Any]:
    """By DeepSpeed's own loader into a fresh engine: what it then holds, and two steps on."""
    engine = jobs.deepspeed_engine(kind, jobs.net(seed=seed), **(UNIVERSAL if universal else {}))
    path, _ = engine.load_checkpoint(where, load_module_strict=not universal)
    assert path is not None
    held = _held(engine)
    decay = [group["weight_decay"] for group in engine.optimizer.param_groups]
    losses = [jobs.step(engine, number) for number in range(steps, steps + 2)]
    return {"held": held, "decay": decay, "losses": losses, "after": _held(engine)}


@pytest.mark.parametrize(
    ("kind", "other", "to"),
    [
        ("zero1-bf16", 3, "universal"),
        ("zero2-fp32", 2, "universal/zero2"),
        ("zero3-bf16", 3, "universal"),
        ("zero3-bf16", 3, "universal/zero3"),
    ],
)
def test_deepspeed_goes_on_from_a_universal_checkpoint(
    ranks2: Pool, tmp_path: Path, kind: str, other: int, to: str
) -> None:
    """Written from a job of other ranks; all bits are those of a load of DeepSpeed's usual format.

    At stage 3 the universal loader gives every group the first one's hyperparameters, so the steps after
    it are others: a fault of DeepSpeed's.
    """
    a, b, again = (str(tmp_path / name) for name in ("a", "b", "again"))
    _ranks.pool(other).run(save_deepspeed, kind, a, 2, {}, timeout=200)
    offline.convert(a, b, to)
    assert offline.open(b).own.written == to
    if to != "universal/zero3":
        (states,) = (tmp_path / "b").rglob("mp_rank_00_model_states.pt")
        weight = torch.load(states, weights_only=False)["module"]["up.weight"]
        assert weight.dtype == {"bf16": torch.bfloat16, "fp32": torch.float32}[kind[-4:]]
    stage = kind.partition("-")[0]
    offline.convert(a, again, f"{stage}:dp=2")
    found = ranks2.run(_load, kind, b, 2, 0, True)
    wanted = ranks2.run(_load, kind, again, 2, 0, False)
    for one, two in zip(found, wanted, strict=True):
        assert jobs.differing(one["held"], two["held"]) == []
        assert two["decay"] == [0.1, 0.0]
        assert one["decay"] == ([0.1, 0.1] if stage == "zero3" else [0.1, 0.0])
        assert one["losses"][0] == two["losses"][0]
        if stage != "zero3":
            assert one["losses"] == two["losses"]
            assert jobs.differing(one["after"], two["after"]) == []


def test_the_universal_loader_leaves_frozen_weights_as_they_are(
    ranks2: Pool, saved: Path, tmp_path: Path
) -> None:
    """A fault of DeepSpeed's: what the file holds of them is not read."""
    b = str(tmp_path / "b")
    offline.convert(saved, b, "universal")
    right, other = (ranks2.run(_load, "zero3-bf16", b, 2, seed, True)[0]["held"] for seed in (0, 5))
    assert "frozen.weight/param" in jobs.differing(right, other)


def _peers(folder: str, into: str) -> None:
    """DeepSpeed's own conversion of a checkpoint that was saved as usual."""
    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal.main(
        argparse.Namespace(
            input_folder=folder,
            output_folder=into,
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )


@pytest.mark.parametrize("kind", ["zero1-bf16", "zero2-fp32", "zero3-bf16", "zero2rr-bf16"])
def test_ds_to_universal_makes_the_same_of_it(ranks2: Pool, tmp_path: Path, kind: str) -> None:
    """Masters, moments and steps, bit for bit; under round_robin_gradients the peer mixes tensors up."""
    a = tmp_path / "a"
    ranks2.run(save_deepspeed, kind, str(a), 2, {})
    _peers(str(a / "step2"), str(tmp_path / "peer"))
    offline.convert(a, tmp_path / "ours", "universal")
    if kind.startswith("zero3"):  # the peer drops frozen weights, without which it is not whole
        with pytest.raises(Refused, match=r"frozen\.weight"):
            offline.open(tmp_path / "peer")
        return
    found = offline.diff(tmp_path / "peer", tmp_path / "ours", ignore_missing=True)
    states = [
        d for d in found.tensors if d.key.rpartition("/")[2] in {"param", "exp_avg", "exp_avg_sq"}
    ]
    assert len(states) >= 12
    differing = {d.key for d in states if d.verdict != "identical"}
    assert bool(differing) == ("rr" in kind), differing


@pytest.mark.parametrize("kind", ["zero1-bf16", "zero2-fp32", "zero3-bf16"])
def test_zero_to_fp32_agrees(ranks2: Pool, tmp_path: Path, kind: str) -> None:
    """The weights in safetensors are those that DeepSpeed's script gathers, tied names included."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    a = tmp_path / "a"
    ranks2.run(save_deepspeed, kind, str(a), 2, {})
    peer = get_fp32_state_dict_from_zero_checkpoint(str(a))
    offline.convert(a, tmp_path / "ours", "safetensors")
    ours = offline.open(tmp_path / "ours").tensors
    names = {str(key).rpartition("/")[0] for key in ours}
    assert names
    missing = names - set(peer)
    # of stage 1 and 2 the script leaves out frozen weights unless a job of stage 3 wrote them
    assert missing <= {"frozen.weight", "frozen.bias"}, missing
    for key in ours:
        name = str(key).rpartition("/")[0]
        if name in peer:
            value = torch.from_numpy(ours[str(key)].copy())
            assert torch.equal(value.float(), peer[name].float().cpu()), name
