"""Ways to get the adapter wrong. Each is a mistake that a careful person makes once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from stripes import adapter
from stripes.adapter import SLOTS, StripesAdapter
from stripes.trainer import deal

from dynadapt.protocols import Agree, AuxItem, Described, Outcome, alone
from dynadapt.vps.box import Box
from dynadapt.vps.keys import Key

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynadapt.vps.keys import KeySpec
    from dynadapt.vps.layout import Row

__all__ = ["MUTANTS", "Mutant"]


def _with_rows(own: Described, change: Callable[[Row], Row]) -> Described:
    return replace(own, rows=tuple(change(row) for row in own.rows))


class Redescribing(StripesAdapter):
    """Describes through `change`, in `describe` as in `prepare`, which ends in it."""

    def describe(self, x: Any) -> Described:
        return self.change(x.model, super().describe(x))

    def change(self, trainer: Any, own: Described) -> Described:
        raise NotImplementedError


class WrongMasterOffset(Redescribing):
    """The masters of one tensor are said to lie one element further, where padding follows them."""

    def change(self, trainer: Any, own: Described) -> Described:
        def shift(row: Row) -> Row:
            odd = row.key == ("last.bias", "param")
            return replace(row, offset=row.offset + 1) if odd else row

        return _with_rows(own, shift)


class WrongMomentOffset(Redescribing):
    """The moments of one tensor are said to lie one element further, where no copy gives it away."""

    def change(self, trainer: Any, own: Described) -> Described:
        def shift(row: Row) -> Row:
            odd = row.key.name == "last.bias" and row.key.slot in SLOTS
            return replace(row, offset=row.offset + 2) if odd else row

        return _with_rows(own, shift)


class SwappedMoments(Redescribing):
    """Each moment is described in the other one's column."""

    def change(self, trainer: Any, own: Described) -> Described:
        def swap(row: Row) -> Row:
            if row.key.slot not in SLOTS:
                return row
            return replace(row, offset=row.offset + (1 if row.key.slot == SLOTS[0] else -1))

        return _with_rows(own, swap)


class StridesOfMasters(Redescribing):
    """The moments are described with the strides of the masters."""

    def change(self, trainer: Any, own: Described) -> Described:
        def narrow(row: Row) -> Row:
            odd = row.key.slot in SLOTS
            return replace(row, strides=tuple(s // 2 for s in row.strides)) if odd else row

        return _with_rows(own, narrow)


class DescribesPadding(Redescribing):
    """The last stripe has its full height, past the end of the tensor."""

    def change(self, trainer: Any, own: Described) -> Described:
        def full(row: Row) -> Row:
            short = row.box.ndim and row.key.slot != "buffer"
            lo = row.box.lo
            hi = (lo[0] + trainer.height, *row.box.hi[1:]) if short else row.box.hi
            return replace(row, box=Box(lo, hi))

        return _with_rows(own, full)


class LosesRows(Redescribing):
    """One rank leaves out what it holds of one tensor."""

    def change(self, trainer: Any, own: Described) -> Described:
        lost = ("second.weight", "param")
        odd = trainer.ranks.rank == 1
        return replace(own, rows=tuple(r for r in own.rows if not odd or r.key != lost))


class WrongDeal(Redescribing):
    """Every rank describes its stripes as if it were rank 0."""

    def describe(self, x: Any) -> Described:
        trainer, own = x.model, x.model.stripes
        trainer.stripes = _dealt_to_rank_0(trainer)
        try:
            return StripesAdapter.describe(self, x)
        finally:
            trainer.stripes = own


def _dealt_to_rank_0(trainer: Any) -> Any:
    """What rank 0 holds, as far as it fits into this rank's memory."""
    found, _ = deal(trainer.tensors, trainer.height, 0, trainer.ranks.size)
    end = trainer.masters.numel()
    return tuple(
        tuple(s for s in stripes if s.offset + (s.stop - s.start) * tensor.width <= end)
        for tensor, stripes in zip(trainer.tensors, found, strict=True)
    )


class TiedTwice(Redescribing):
    """A tied tensor is described under each of its names, as if it were two."""

    def change(self, trainer: Any, own: Described) -> Described:
        again = [spec for spec in own.specs if spec.aliases]
        names = {spec.key.name: spec.aliases[0] for spec in again}

        def renamed(key: Key) -> Key:
            return Key(names[key.name], key.slot)

        specs = [replace(spec, aliases=()) for spec in own.specs]
        specs += [replace(spec, key=renamed(spec.key), aliases=()) for spec in again]
        rows = [replace(row, key=renamed(row.key)) for row in own.rows if row.key.name in names]
        return replace(own, specs=tuple(specs), rows=(*own.rows, *rows))


class MomentsAlwaysPresent(Redescribing):
    """A fresh trainer is said to have moments, though it has no memory for them."""

    def change(self, trainer: Any, own: Described) -> Described:
        return replace(own, specs=tuple(replace(spec, presence="present") for spec in own.specs))


class NoSteps(Redescribing):
    """The step count is not described at all."""

    def change(self, trainer: Any, own: Described) -> Described:
        return replace(own, scalars={})


class AuxCannotTravel(Redescribing):
    """An object in the aux items."""

    def change(self, trainer: Any, own: Described) -> Described:
        return replace(own, aux=(*own.aux, AuxItem("counters", {"loss": torch.zeros(1)})))


class DescribesTogether(Redescribing):
    """Gathers while it describes: correct as long as all ranks happen to describe at once."""

    def change(self, trainer: Any, own: Described) -> Described:
        trainer.gather()
        trainer.whole = None
        return own


class KeepsWholeWeights(StripesAdapter):
    """Leaves the gathered weights in place."""

    def quiesce(self, x: Any, agree: Agree = alone) -> None:
        whole = x.model.whole
        super().quiesce(x, agree)
        x.model.whole = whole

    def finish(self, x: Any, *rest: Any) -> tuple[Outcome, ...]:
        whole = x.model.whole
        found = super().finish(x, *rest)
        x.model.whole = whole
        return found


class MissesOpenSteps(StripesAdapter):
    """Does not look at accumulated gradients."""

    def quiesce(self, x: Any, agree: Agree = alone) -> None:
        x.model.micro_steps, micro_steps = 0, x.model.micro_steps
        super().quiesce(x, agree)
        x.model.micro_steps = micro_steps


class NeverAgrees(StripesAdapter):
    """Drops the whole weights on this rank though another one may have refused."""

    def quiesce(self, x: Any, agree: Agree = alone) -> None:
        super().quiesce(x)


class StaleCopies(StripesAdapter):
    """Does not cast the copies anew."""

    def finish(self, x: Any, *rest: Any) -> tuple[Outcome, ...]:
        copies = x.model.copies.clone()
        found = super().finish(x, *rest)
        x.model.copies.copy_(copies)
        return found


class LosesSteps(StripesAdapter):
    """Keeps the target's own step count."""

    def finish(self, x: Any, *rest: Any) -> tuple[Outcome, ...]:
        steps = x.model.steps
        found = super().finish(x, *rest)
        x.model.steps = steps
        return found


class LosesRate(StripesAdapter):
    """Keeps the target's own learning rate, and says that all is well."""

    def finish(self, x: Any, *rest: Any) -> tuple[Outcome, ...]:
        rate = x.model.lr
        found = super().finish(x, *rest)
        x.model.lr = rate
        return found


class PassesOver(StripesAdapter):
    """Does not say what became of the count of samples."""

    def finish(self, x: Any, *rest: Any) -> tuple[Outcome, ...]:
        samples = x.model.samples
        found = super().finish(x, *rest)
        x.model.samples = samples
        return tuple(outcome for outcome in found if outcome.path != "data")


class FakeStep(StripesAdapter):
    """Makes the moments by a step with gradients of zero, which decays the weights."""

    def prepare(self, x: Any, keys: tuple[KeySpec, ...]) -> Described:
        trainer = x.model
        fresh = trainer.moments is None
        if fresh:
            trainer.gradients = torch.zeros_like(trainer.masters)
            trainer.step()
        found = super().prepare(x, keys)
        if fresh:
            adapter._before[trainer] = replace(adapter._before[trainer], moments=None, steps=0)
        return found


class ForgetsToAbandon(StripesAdapter):
    """Leaves behind what `prepare` made."""

    def abandon(self, x: Any) -> None:
        return None


class FinishesTooSoon(StripesAdapter):
    """Forgets in `finish` what `abandon` would need, though the certificate may still fail."""

    def finish(self, x: Any, *rest: Any) -> tuple[Outcome, ...]:
        adapter._before.pop(x.model, None)
        return super().finish(x, *rest)


class KeepsOldSteps(StripesAdapter):
    """Sets the step count only where the source tells one."""

    def finish(self, x: Any, keys: Any, scalars: Any, *rest: Any) -> tuple[Outcome, ...]:
        steps = x.model.steps
        found = super().finish(x, keys, scalars, *rest)
        x.model.steps = x.model.steps if scalars else steps
        return found


class DescribesCopies(StripesAdapter):
    """Its buffers are copies of the trainer's memory: right to read, lost when written."""

    def describe(self, x: Any) -> Described:
        own = super().describe(x)
        copies = {n: adapter.FlatBuffer(b.tensor().clone()) for n, b in own.buffers.items()}
        return replace(own, buffers=copies)


class CannotRefill(StripesAdapter):
    """Its buffers come back from parking with half of their memory."""

    def describe(self, x: Any) -> Described:
        own = super().describe(x)
        for buffer in own.buffers.values():
            buffer._nbytes //= 2  # type: ignore[attr-defined]
        return own


@dataclass(frozen=True)
class Mutant:
    """A wrong adapter, and words of what the scenario says about it.

    `alone` is false where only another framework on the other side shows it: both of its own sides are
    wrong alike.
    """

    kind: type[StripesAdapter]
    said: str
    alone: bool = True


MUTANTS = (
    Mutant(WrongMasterOffset, "last.bias/compute"),
    Mutant(WrongMomentOffset, "an evaluation after that step gives"),
    Mutant(SwappedMoments, "an evaluation after that step gives", alone=False),
    Mutant(StridesOfMasters, "the row shares memory with"),
    Mutant(DescribesPadding, "leaves the shape"),
    Mutant(LosesRows, "elements are held by no endpoint"),
    Mutant(WrongDeal, "elements are held by no endpoint"),
    Mutant(TiedTwice, "the row shares memory with"),
    Mutant(DescribesCopies, "is not the source's"),
    Mutant(MomentsAlwaysPresent, "elements are held by no endpoint"),
    Mutant(AuxCannotTravel, "cannot travel"),
    Mutant(DescribesTogether, "must not communicate"),
    Mutant(KeepsWholeWeights, "an evaluation gives"),
    Mutant(MissesOpenSteps, "the reason is 'not refused'"),
    Mutant(NeverAgrees, "the ranks exchange different things"),  # most frameworks hang
    Mutant(FakeStep, "prepare and abandon changed values"),
    Mutant(ForgetsToAbandon, "abandon left something of prepare behind"),
    Mutant(FinishesTooSoon, "abandon did not put back"),
    Mutant(StaleCopies, "/compute"),
    Mutant(LosesSteps, "/step: is 0 in the target and 2 in the source"),
    Mutant(NoSteps, "an evaluation after that step gives"),
    Mutant(KeepsOldSteps, "an evaluation after the first step gives"),
    Mutant(LosesRate, "/lr: is "),
    Mutant(PassesOver, "what became of the aux item 'data'"),
    Mutant(CannotRefill, "after refill"),
)
