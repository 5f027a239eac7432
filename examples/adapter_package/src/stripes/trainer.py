"""A small in-house trainer that cuts every tensor into stripes of rows and deals them out in turn.

A rank keeps the stripes that it was dealt one after another in flat buffers: fp32 masters, bf16 copies
of them, and one [n, 2] buffer in which both Adam moments of an element lie side by side. The forward
works on whole weights gathered from the copies of all ranks. Nothing here knows of dynadapt.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["GlooRanks", "Ranks", "Stripe", "Striped", "ThreadRanks", "Trainer", "deal"]

ALIGN = 4
"""Every tensor starts at a multiple of this in the flat buffers; what lies between is padding."""


class Ranks(Protocol):
    """The ranks that train together."""

    rank: int
    size: int

    def exchange(self, what: str, own: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's 1-D tensor, by rank; their lengths may differ. All ranks call it alike."""
        ...


class GlooRanks:
    """The ranks of torch.distributed's default group."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def exchange(self, what: str, own: torch.Tensor) -> list[torch.Tensor]:
        """See `Ranks`."""
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([own.numel()]))
        padded = own.new_zeros(max(int(length) for length in lengths))
        padded[: own.numel()] = own
        parts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(parts, padded)
        return [part[: int(length)] for part, length in zip(parts, lengths, strict=True)]


@dataclass
class ThreadRanks:
    """Ranks that are threads of one process; `of` makes them all. `barrier` is theirs together."""

    rank: int
    size: int
    barrier: threading.Barrier
    _slots: dict[int, tuple[str, torch.Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, size: int, timeout: float = 20.0) -> list[ThreadRanks]:
        """All ranks of a world; one that waits longer than `timeout` seconds for another raises.

        >>> [ranks.rank for ranks in ThreadRanks.of(2)]
        [0, 1]
        """
        barrier = threading.Barrier(size, timeout=timeout)
        slots: dict[int, tuple[str, torch.Tensor]] = {}
        return [cls(rank, size, barrier, slots) for rank in range(size)]

    def exchange(self, what: str, own: torch.Tensor) -> list[torch.Tensor]:
        """See `Ranks`."""
        self._slots[self.rank] = what, own.clone()
        self.barrier.wait()
        calls, parts = zip(*(self._slots[rank] for rank in range(self.size)), strict=True)
        self.barrier.wait()
        if len(set(calls)) > 1:
            raise RuntimeError(f"the ranks exchange different things: {', '.join(calls)}")
        return list(parts)


@dataclass(frozen=True, slots=True)
class Striped:
    """A tensor as a matrix of rows. `names` are all its names, sorted: a tied one has several."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    trainable: bool = True

    @property
    def rows(self) -> int:
        """Size of dim 0; a tensor without dims is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def width(self) -> int:
        """Elements in a row."""
        return prod(self.shape[1:])


@dataclass(frozen=True, slots=True)
class Stripe:
    """Rows `[start, stop)` of a tensor, row-major from `offset` on in the flat buffers of its rank."""

    start: int
    stop: int
    offset: int


def deal(
    tensors: Iterable[Striped], height: int, rank: int, size: int
) -> tuple[tuple[tuple[Stripe, ...], ...], int]:
    """The stripes of each tensor that one rank is dealt, and the length of its flat buffers.

    Stripe `i` (of `height` rows, the last may have fewer) of tensor `t` goes to rank `(i + t) % size`.

    >>> deal([Striped(("w",), (5, 3))], 2, 0, 2)
    (((Stripe(start=0, stop=2, offset=0), Stripe(start=4, stop=5, offset=6)),), 12)
    """
    dealt, end = [], 0
    for number, tensor in enumerate(tensors):
        own = []
        first = (rank - number) % size * height
        for start in range(first, tensor.rows if tensor.width else 0, size * height):
            own.append(Stripe(start, min(start + height, tensor.rows), end))
            end += (own[-1].stop - start) * tensor.width
        end = -(-end // ALIGN) * ALIGN
        dealt.append(tuple(own))
    return tuple(dealt), end


class Trainer:
    """Trains one model over all ranks: AdamW on fp32 masters, forward and backward on bf16 weights.

    `model` must be equal on all ranks; its parameters move into the trainer and the module keeps none.
    `loss(forward, batch)` is given the model as a function. Call `accumulate` once or more, then `step`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Callable[[Callable[..., torch.Tensor], Any], torch.Tensor],
        ranks: Ranks,
        *,
        height: int = 2,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        self.ranks, self.height = ranks, height
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        groups: dict[torch.nn.Parameter, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            groups.setdefault(parameter, []).append(name)
        self.tensors = tuple(
            Striped(tuple(sorted(names)), tuple(parameter.shape), parameter.requires_grad)
            for parameter, names in groups.items()
        )
        self.stripes, length = deal(self.tensors, height, ranks.rank, ranks.size)
        self.masters = torch.zeros(length)
        self._take([parameter.detach() for parameter in groups], self.masters)
        self.copies = self.masters.bfloat16()
        self.buffers = {name: b.detach().contiguous().clone() for name, b in model.named_buffers()}
        self.moments: torch.Tensor | None = None
        self.gradients: torch.Tensor | None = None
        self.whole: list[torch.Tensor] | None = None
        self.micro_steps = self.steps = self.samples = 0
        self._model, self._loss = model.to("meta"), loss

    def _parts(self, number: int, flat: torch.Tensor) -> Iterator[tuple[Stripe, torch.Tensor]]:
        """This rank's stripes of one tensor, each with its elements in a flat buffer, as rows."""
        width = self.tensors[number].width
        for stripe in self.stripes[number]:
            end = stripe.offset + (stripe.stop - stripe.start) * width
            yield stripe, flat[stripe.offset : end].view(-1, width)

    def _take(self, whole: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
        """Copy this rank's stripes of whole tensors into a flat buffer."""
        for number, tensor in enumerate(whole):
            for stripe, rows in self._parts(number, flat):
                rows.copy_(tensor.reshape(-1, rows.shape[1])[stripe.start : stripe.stop])

    def gather(self) -> list[torch.Tensor]:
        """The weights as a forward sees them; kept until the next step. All ranks call it."""
        if self.whole is None:
            whole = [torch.empty(tensor.rows, tensor.width) for tensor in self.tensors]
            for rank, part in enumerate(self.ranks.exchange("copies", self.copies)):
                dealt, _ = deal(self.tensors, self.height, rank, self.ranks.size)
                for full, stripes in zip(whole, dealt, strict=True):
                    for stripe in stripes:
                        rows = full[stripe.start : stripe.stop]
                        rows.copy_(part[stripe.offset :][: rows.numel()].view_as(rows))
            self.whole = [w.view(t.shape) for w, t in zip(whole, self.tensors, strict=True)]
        return self.whole

    def _loss_of(self, weights: Sequence[torch.Tensor], batch: Any) -> torch.Tensor:
        given = dict(self.buffers)
        for tensor, weight in zip(self.tensors, weights, strict=True):
            given.update(dict.fromkeys(tensor.names, weight))
        return self._loss(lambda *x: torch.func.functional_call(self._model, given, x), batch)

    def accumulate(self, batch: torch.Tensor) -> float:
        """Add the gradients of this rank's batch; the mean loss over all ranks, which all call it."""
        leaves = [
            weight.detach().requires_grad_(tensor.trainable)
            for weight, tensor in zip(self.gather(), self.tensors, strict=True)
        ]
        loss = self._loss_of(leaves, batch)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found = iter(torch.autograd.grad(loss, wanted, materialize_grads=True))
        full = [next(found) if leaf.requires_grad else torch.zeros_like(leaf) for leaf in leaves]
        flat = torch.cat([*(gradient.reshape(-1) for gradient in full), loss.detach().reshape(1)])
        mean = torch.stack(self.ranks.exchange("gradients", flat)).mean(0)
        own = torch.zeros_like(self.masters)
        sizes = [leaf.numel() for leaf in leaves]
        self._take(torch.split(mean[:-1], sizes), own)
        self.gradients = own if self.gradients is None else self.gradients + own
        self.micro_steps += 1
        self.samples += len(batch) * self.ranks.size
        return float(mean[-1])

    def step(self) -> None:
        """Use the gradients that were accumulated. Local: no communication."""
        if self.gradients is None:
            raise RuntimeError("there are no gradients: call accumulate first")
        if self.moments is None:
            self.moments = torch.zeros(self.masters.numel(), 2)
        self.steps += 1
        first, second = self.betas
        rate = self.lr / (1 - first**self.steps)
        scale = (1 - second**self.steps) ** 0.5
        for number, tensor in enumerate(self.tensors):
            for stripe, weight in self._parts(number, self.masters) if tensor.trainable else ():
                part = slice(stripe.offset, stripe.offset + weight.numel())
                gradient, moments = self.gradients[part], self.moments[part]
                mean, square = moments[:, 0], moments[:, 1]
                mean.lerp_(gradient, 1 - first)
                square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
                flat = weight.view(-1).mul_(1 - self.lr * self.weight_decay)
                flat.addcdiv_(mean, square.sqrt().div_(scale).add_(self.eps), value=-rate)
        self.renew()
        self.drop_gradients()

    def renew(self) -> None:
        """Cast the copies from the masters anew, and drop the whole weights made of the old ones."""
        self.copies.copy_(self.masters)
        self.whole = None

    def drop_gradients(self) -> None:
        """Back to a step boundary without a step."""
        self.gradients, self.micro_steps = None, 0

    @torch.no_grad()
    def evaluate(self, batch: torch.Tensor) -> float:
        """The mean loss over all ranks. They all call it; the whole weights stay for the next call."""
        loss = self._loss_of(self.gather(), batch)
        return float(torch.stack(self.ranks.exchange("loss", loss.reshape(1))).mean())
