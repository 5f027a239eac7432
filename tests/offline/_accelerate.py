"""Real jobs under Accelerate on gloo ranks: trained, saved by `save_state`, loaded by `load_state`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests.live import jobs

if TYPE_CHECKING:
    from accelerate import Accelerator

DEEPSPEED = {"zero0": 0, "zero1": 1, "zero2": 2, "zero3": 3}


class Seen:
    """An object that a script registers for checkpointing."""

    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]


class Job:
    """A script: model, optimizer, schedule and an object of its own, prepared by an `Accelerator`."""

    def __init__(self, rank: int, kind: str, seed: int = 0) -> None:
        self.kind, _, self.precision = kind.partition("-")
        self.rank = rank
        self.accelerator = self._accelerator()
        model = jobs.net(seed, integers=self.kind not in DEEPSPEED)
        if self.kind.startswith("fsdp1"):
            model = self.accelerator.prepare(model)
        optimizer = jobs.adamw(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        if self.kind.startswith("fsdp1"):
            self.model = model
            self.optimizer, self.scheduler = self.accelerator.prepare(optimizer, scheduler)
        else:
            self.model, self.optimizer, self.scheduler = self.accelerator.prepare(
                model, optimizer, scheduler
            )
        self.seen = Seen()
        self.accelerator.register_for_checkpointing(self.seen)

    def _accelerator(self) -> Accelerator:
        from accelerate import Accelerator, DeepSpeedPlugin
        from accelerate.utils import InitProcessGroupKwargs

        if self.kind in DEEPSPEED:
            stage = DEEPSPEED[self.kind]
            config = {
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 1,
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                "gradient_clipping": 0.0,
                "steps_per_print": 10**9,
                "zero_optimization": {"stage": stage, **(jobs.SMALL_3 if stage == 3 else {})},
                **jobs.PRECISIONS[self.precision],
            }
            return Accelerator(
                deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
                kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
            )
        accelerator = Accelerator(cpu=True)
        if self.kind.startswith("fsdp"):
            _as_fsdp(self.kind)
        return accelerator

    def step(self, number: int) -> float:
        """One step on this rank's batch."""
        loss = self.model(jobs.tokens(number, self.rank))
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.seen.batches += 1
        return float(loss.detach())

    def tensors(self) -> jobs.Tensors:
        """Every parameter and state, by the framework's own gathers."""
        if self.kind in DEEPSPEED:
            return jobs.zero_tensors(self.model)
        if self.kind.startswith("fsdp1"):
            return jobs.fsdp1_tensors(self.model, self.optimizer.optimizer)
        return jobs.torch_tensors(self.model, self.optimizer.optimizer)

    def fingerprint(self) -> str:
        """That of the live job, as dynadapt sees it."""
        import dynadapt

        if self.kind in DEEPSPEED:
            return dynadapt.fingerprint(self.model)
        return dynadapt.fingerprint(dynadapt.TrainState(self.model, self.optimizer))


def _as_fsdp(kind: str) -> None:
    """Accelerate declines FSDP on CPU: told by its own state that it has it, it does all of it."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    full = kind.endswith("full")
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2 if kind.startswith("fsdp2") else 1,
        state_dict_type="FULL_STATE_DICT" if full else "SHARDED_STATE_DICT",
        reshard_after_forward=kind.startswith("fsdp2") or "FULL_SHARD",
        auto_wrap_policy="no_wrap",
        use_orig_params=True,
        cpu_ram_efficient_loading=False,
    )
    for state in (PartialState, AcceleratorState):
        state._shared_state["distributed_type"] = DistributedType.FSDP
        state._shared_state["fsdp_plugin"] = plugin
        state._shared_state["device"] = torch.device("cpu")


def save(
    rank: int, world: int, kind: str, where: str, steps: int, safe: bool = True
) -> dict[str, Any]:
    """Train, save, train on: what was held when it was saved, and what came after."""
    job = Job(rank, kind)
    for number in range(steps):
        job.step(number)
    job.accelerator.save_state(where, safe_serialization=safe)
    answer: dict[str, Any] = {"fingerprint": job.fingerprint(), "tensors": job.tensors()}
    return answer | _on(job, steps)


def load(
    rank: int, world: int, kind: str, where: str, steps: int, by: str = "accelerate"
) -> dict[str, Any]:
    """Load into a fresh job, by Accelerate or by `dynadapt.load`, train on."""
    import dynadapt

    job = Job(rank, kind, seed=5)
    if by == "accelerate":
        job.accelerator.load_state(where)
    else:
        state = dynadapt.TrainState(job.model, job.optimizer)
        dynadapt.load(state, where, model=job.model, timeout=60)
        assert dynadapt.fingerprint(where, model=job.model) == dynadapt.fingerprint(state)
    answer: dict[str, Any] = {"fingerprint": job.fingerprint(), "tensors": job.tensors()}
    return answer | _on(job, steps)


def _on(job: Job, steps: int) -> dict[str, Any]:
    return {
        "batches": job.seen.batches,
        "random": torch.rand(3).tolist(),
        "rates": [group["lr"] for group in job.optimizer.param_groups],
        "losses": [job.step(number) for number in range(steps, steps + 2)],
        "after": job.tensors(),
        "rates after": [group["lr"] for group in job.optimizer.param_groups],
    }
