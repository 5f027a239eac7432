"""PEFT B84, B86, B87, FROZEN B11, DTYPE B75: LoRA models between frameworks, to and from their base."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import dynadapt
from dynadapt.vps.shipped_maps import PEFT
from tests.live import jobs

if TYPE_CHECKING:
    from tests._ranks import Pool


def lora(seed: int) -> nn.Module:
    """The job's model with adapters that do something, and a norm that is trained as a copy."""
    import peft

    config = peft.LoraConfig(r=2, target_modules=["up", "down"], modules_to_save=["norm"])
    torch.manual_seed(seed)
    model = peft.get_peft_model(rounded(jobs.net(seed)), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return model


def rounded(model: nn.Module) -> nn.Module:
    """Weights that bf16 can hold, as a published checkpoint's are: frozen ones lose nothing in ZeRO."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


class Lora:
    """A LoRA job in one layout."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, model = kind, lora(seed)
        self.engine: Any = None
        if kind.startswith("zero"):
            self.engine = jobs.deepspeed_engine(kind, model, jobs.adamw(model))
            self.state = dynadapt.TrainState(self.engine, counters={})
            return
        if kind == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            fully_shard(model.base_model.model.up)
            fully_shard(model)
        if kind == "fsdp1":
            model = jobs.fsdp1(model, units=())
        self.state = dynadapt.TrainState(model, jobs.adamw(model), counters={})

    def step(self, number: int) -> float:
        """One step on the same batch on every rank."""
        batch = jobs.tokens(number)
        model = self.engine or self.state.model
        loss = model(batch)
        if self.engine is not None:
            self.engine.backward(loss)
            self.engine.step()
        else:
            loss.backward()
            self.state.optimizer.step()
            self.state.optimizer.zero_grad()
        return float(loss.detach())

    def tensors(self) -> jobs.Tensors:
        """Everything, by the framework's own gathers."""
        if self.engine is not None:
            return jobs.zero_tensors(self.engine)
        if self.kind == "fsdp1":
            return jobs.fsdp1_tensors(self.state.model, self.state.optimizer)
        return jobs.torch_tensors(self.state.model, self.state.optimizer)


CHAIN = ("zero3-bf16", "fsdp2", "zero2-bf16", "plain", "zero3-bf16", "fsdp1", "zero1-bf16", "fsdp2")


def _through_layouts(rank: int, world: int) -> list[dict[str, Any]]:
    job, answers = Lora(CHAIN[0], 0), []
    for number, kind in enumerate(CHAIN[1:]):
        job.step(2 * number)
        before, next_job = job.tensors(), Lora(kind, 1 + number)
        report = dynadapt.migrate(job.state, next_job.state, timeout=30)
        after = next_job.tensors()
        losses = [each.step(2 * number + 1) for each in (job, next_job)]
        answers.append(
            {
                "hop": f"{job.kind} -> {kind}",
                "names": sorted(before.keys() ^ after.keys()),
                "differing": jobs.differing(before, after),
                "extra bytes": report.bytes_moved - report.bytes_minimum,
                "gap": abs(losses[0] - losses[1]),
            }
        )
        job = next_job
    return answers


def test_adapters_and_their_frozen_base_through_layouts(ranks4: Pool) -> None:
    """B84, B87: bits of base, adapters and moments, and the next step's loss, in every layout."""
    for answers in ranks4.run(_through_layouts, timeout=200):
        for answer in answers:
            assert answer["names"] == [], answer
            assert answer["differing"] == [], answer
            assert answer["extra bytes"] == 0, answer
            assert answer["gap"] < 0.1, answer


def _to_and_from_the_base(rank: int, world: int, kind: str) -> dict[str, Any]:
    job = Lora(kind, 0)
    for number in range(2):
        job.step(number)
    before = job.tensors()
    base = rounded(jobs.net(seed=5))
    answer: dict[str, Any] = {}
    try:
        dynadapt.migrate(base, job.state, target_map=PEFT, timeout=30)
    except dynadapt.MigrationAborted as error:
        answer["refused"] = {f.where for f in error.findings if f.reason == "missing-key"}
    into = dynadapt.migrate(base, job.state, target_map=PEFT, allow={"missing"}, timeout=30)
    after = job.tensors()
    answer["changed"] = {n for n in before if not torch.equal(before[n], after[n])}
    expected = {n: p.detach() for n, p in base.named_parameters(remove_duplicate=False)}
    answer["wrong"] = [
        name
        for name, value in after.items()
        if (common := common_name(name)) in expected and not torch.equal(value, expected[common])
    ]
    answer["steps"] = {
        common_name(name): entry["step"]
        for name, entry in dynadapt.describe(job.state).scalars.items()
    }
    answer["kept"] = sorted(
        {o.path.split("/")[0] for o in into.outcomes if "keeps its own" in o.note}
    )
    job.step(2)
    trained = job.tensors()
    out = jobs.net(seed=6)
    back = dynadapt.migrate(job.state, out, source_map=PEFT, allow={"extra"}, timeout=30)
    found = dict(out.named_parameters())
    answer["out"] = [
        name
        for name, value in trained.items()
        if (common := common_name(name)) in found and not torch.equal(value, found[common].detach())
    ]
    answer["dropped"] = {o.path for o in back.outcomes if o.kind == "dropped"}
    return answer


def common_name(key: str) -> str:
    """The base model's name of a weight, written out anew; "" for a state."""
    name, _, slot = key.partition("/")
    for part in ("base_model.model.", ".base_layer", ".modules_to_save.default"):
        name = name.replace(part, "." if part.startswith(".mod") else "").replace("..", ".")
    return name if slot in {"", "param"} else ""


def test_a_base_model_into_its_adapters_and_back(ranks4: Pool) -> None:
    """B84, B86: what a base lacks is listed by name; adapters, moments and steps stay as they were."""
    lacking = {
        *(f"{layer}.lora_{ab}.default.weight/param" for layer in ("up", "down") for ab in "AB"),
        *(f"norm.original_module.{w}/param" for w in ("weight", "bias")),
    }
    for kind in ("zero3-bf16", "fsdp2"):
        for answer in ranks4.run(_to_and_from_the_base, kind, timeout=200):
            missing = {w.partition("/")[0] + "/param" for w in answer["refused"]}
            assert lacking <= missing, answer
            assert answer["wrong"] == [], answer
            assert not any("lora" in name for name in answer["changed"]), answer
            assert "base_model.model.up.base_layer.weight/param" in answer["changed"]
            assert set(answer["steps"].values()) == {2}, answer
            assert answer["out"] == [], answer
            assert any("up.lora_A.default.weight/" in path for path in answer["dropped"]), answer


class Trained(nn.Module):
    """Nothing but the tensors that a LoRA job trains, under its names."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        for name, parameter in lora(seed).named_parameters():
            if parameter.requires_grad:
                path, _, leaf = name.rpartition(".")
                holder: nn.Module = self
                for part in path.split("."):
                    if not hasattr(holder, part):
                        holder.add_module(part, nn.Module())
                    holder = holder.get_submodule(part)
                holder.register_parameter(leaf, nn.Parameter(parameter.detach().clone()))


def _only_what_trains(rank: int, world: int, kind: str) -> dict[str, Any]:
    job = Lora(kind, 0)
    job.step(0)
    before = job.tensors()
    part = Trained(1)
    target = dynadapt.TrainState(part, jobs.adamw(part), counters={})
    answer: dict[str, Any] = {}
    try:
        dynadapt.migrate(job.state, target, timeout=30)
    except dynadapt.MigrationAborted as error:
        answer["refused"] = (error.reason, {f.where.split("/")[0] for f in error.findings})
    report = dynadapt.migrate(job.state, target, allow={"extra"}, timeout=30)
    arrived = jobs.torch_tensors(part, target.optimizer)
    answer["differing"] = jobs.differing({name: before[name] for name in arrived}, arrived)
    left = {o.path.split("/")[0] for o in report.outcomes if o.kind == "dropped" and "." in o.path}
    answer["left"] = {name for name in left if name in dict(lora(0).named_parameters())}
    answer["needed"] = sum(tensor.nbytes for tensor in arrived.values())
    answer["moved"] = report.bytes_moved
    back = Lora(kind, 2)
    back.step(0)
    kept = back.tensors()
    dynadapt.migrate(target, back.state, allow={"missing"}, timeout=30)
    after = back.tensors()
    answer["back"] = jobs.differing(
        {name: before[name] if name in arrived else kept[name] for name in kept}, after
    )
    return answer


@pytest.mark.parametrize("kind", ["zero3-bf16", "fsdp2"])
def test_only_what_is_trained_of_a_mostly_frozen_model(ranks2: Pool, kind: str) -> None:
    """FROZEN B11: out and in again; what is left behind, or kept, is named and costs no byte."""
    named = dict(lora(0).named_parameters())
    frozen = {name for name, p in named.items() if not p.requires_grad}
    for answer in ranks2.run(_only_what_trains, kind, timeout=100):
        assert answer["refused"][0] == "extra-key"
        assert frozen <= answer["refused"][1]
        assert answer["differing"] == []
        assert frozen <= answer["left"]
        assert answer["moved"] <= 2 * answer["needed"]
        assert answer["back"] == []


def _into_a_bf16_model(rank: int, world: int) -> tuple[str, set[tuple[str, str]], bool]:
    """fp32 adapters over a base; the other side is bf16 all through and calls adapters otherwise."""
    job = Lora("zero3-bf16", 0)
    job.step(0)
    target = lora(1).to(torch.bfloat16)
    target.base_model.model.up.lora_A["other"] = target.base_model.model.up.lora_A.pop("default")
    before = {name: p.detach().clone() for name, p in target.named_parameters()}
    found: tuple[str, set[tuple[str, str]]] = ("moved", set())
    try:
        dynadapt.migrate(job.state, target, narrow="refuse", timeout=30)
    except dynadapt.MigrationAborted as error:
        found = (error.reason, {(f.reason, f.where.split("/")[0]) for f in error.findings})
    same = all(torch.equal(before[name], p.detach()) for name, p in target.named_parameters())
    return (*found, same)


def test_dtypes_and_names_that_do_not_fit_are_told_at_once(ranks2: Pool) -> None:
    """DTYPE B75: every name without a place and every dtype too narrow, before a byte."""
    layers = "base_model.model"
    for _, found, same in ranks2.run(_into_a_bf16_model, timeout=100):
        assert same
        assert {
            ("missing-key", f"{layers}.up.lora_A.other.weight"),
            ("extra-key", f"{layers}.up.lora_A.default.weight"),
            ("narrowing", f"{layers}.up.lora_B.default.weight"),
            ("narrowing", f"{layers}.down.lora_A.default.weight"),
        } <= found
        assert not any("base_layer" in name for reason, name in found if reason == "narrowing")
