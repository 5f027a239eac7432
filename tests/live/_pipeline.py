"""`jobs.Net` as the stages of a torch pipeline, and a schedule that trains them."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from tests.live import jobs

#: What `Net` does, in the order it does it: a step takes and gives a tuple.
PIECES = ("embed", "up", "down", "head")
OF = {
    "embed": ("embed", "scale"),
    "up": ("norm", "up"),
    "down": ("down", "frozen", "table"),
    "head": ("head",),
}
TIED = (("embed.weight", "head.weight"),)


class StageNet(nn.Module):
    """A copy of a `Net` without what other stages do; what is left keeps its name."""

    def __init__(self, net: jobs.Net, pieces: tuple[str, ...]) -> None:
        super().__init__()
        self.pieces = pieces
        kept = [name for piece in pieces for name in OF[piece]]
        for name, child in net.named_children():
            if name in kept:
                self.add_module(name, copy.deepcopy(child))
        lost = net._non_persistent_buffers_set
        for name, buffer in net.named_buffers():
            if name in kept:
                self.register_buffer(name, buffer.clone(), persistent=name not in lost)
        if {"embed", "head"} <= set(kept):
            self.head.weight = self.embed.weight

    def forward(self, *inputs: torch.Tensor) -> Any:
        """The pieces one after another."""
        for piece in self.pieces:
            inputs = getattr(self, f"_{piece}")(*inputs)
        return inputs[0] if len(inputs) == 1 else inputs

    def _embed(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.embed(tokens),)

    def _up(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x, torch.relu(self.up(self.norm(x)))

    def _down(self, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x + self.down(h) + self.frozen(x),)

    def _head(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.head(x).float(),)


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """`Net`'s loss."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def cut(count: int) -> list[tuple[str, ...]]:
    """The pieces of each of 1 to 4 stages; the first stages have more."""
    each, more = divmod(len(PIECES), count)
    sizes = [each + (at < more) for at in range(count)]
    starts = [sum(sizes[:at]) for at in range(count)]
    return [PIECES[start : start + size] for start, size in zip(starts, sizes, strict=True)]


class Pipeline:
    """A rank's stages, the schedule over them, and the group that keeps the tie equal.

    `mesh` has an axis `pp` and may have an axis `dp`; `data` says how the stages lie over that: by
    themselves, "replicate" or "fully_shard". (torch's DDP in a stage fails at its second step.)
    """

    def __init__(
        self, net: jobs.Net, mesh: DeviceMesh, schedule: str = "GPipe", data: str = ""
    ) -> None:
        from torch.distributed._composable.replicate_with_fsdp import replicate
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.pipelining import PipelineStage, schedules

        kind = schedules.get_schedule_class(schedule)
        self.group = mesh.get_group("pp")
        size, rank = mesh["pp"].size(), mesh.get_local_rank("pp")
        several = issubclass(kind, schedules.PipelineScheduleMulti)
        count = 2 * size if several else size
        pieces = cut(count)
        self.stages = []
        for number in range(rank, count, size):
            module: nn.Module = StageNet(net, pieces[number])
            if data == "replicate":
                module = replicate(module, mesh=mesh["dp"])
            elif data == "fully_shard":
                module = fully_shard(module, mesh=mesh["dp"])
            device = torch.device("cpu")
            self.stages.append(PipelineStage(module, number, count, device, group=self.group))
        parts: Any = self.stages if several else self.stages[0]
        self.schedule = kind(parts, n_microbatches=2, loss_fn=loss_of)
        self.first, self.last = rank == 0, rank == (count - 1) % size
        self.ends = (0, (count - 1) % size)
        self.modules = nn.ModuleList([stage.submod for stage in self.stages])

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Those of all stages on this rank, by the whole model's names."""
        return [named for module in self.modules for named in module.named_parameters()]

    def _tied(self) -> list[nn.Parameter]:
        ends = {name for names in TIED for name in names}
        return [p for name, p in self.named_parameters() if name in ends]

    def run(self, tokens: torch.Tensor) -> float:
        """All microbatches forward and backward; the loss, on every rank."""
        losses: list[torch.Tensor] = []
        inputs = (tokens,) if self.first else ()
        target = tokens if self.last else None
        self.schedule.step(*inputs, target=target, losses=losses)
        self.sum_tied()
        return self._told(losses)

    def sum_tied(self) -> None:
        """Both copies of a tie get both gradients, as one parameter would."""
        ranks = sorted({dist.get_global_rank(self.group, at) for at in self.ends})
        if len(ranks) < 2:
            return
        for p in self._tied():
            grad = p.grad
            assert grad is not None
            local = getattr(grad, "_local_tensor", grad)
            me, other = dist.get_rank(), next(r for r in ranks if r != dist.get_rank())
            theirs = torch.empty_like(local)
            ops = [
                dist.P2POp(dist.irecv, theirs, other, group=self.group),
                dist.P2POp(dist.isend, local.contiguous(), other, group=self.group),
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            total = local + theirs if me < other else theirs + local
            local.copy_(total)

    def evaluate(self, tokens: torch.Tensor) -> float:
        """The loss without gradients."""
        losses: list[torch.Tensor] = []
        inputs = (tokens,) if self.first else ()
        target = tokens if self.last else None
        self.schedule.eval(*inputs, target=target, losses=losses)
        return self._told(losses)

    def _told(self, losses: list[torch.Tensor]) -> float:
        mean = torch.stack(losses).mean().detach() if self.last else torch.zeros(())
        last = dist.get_global_rank(self.group, self.ends[1])
        dist.broadcast(mean, last, group=self.group)
        return float(mean)
