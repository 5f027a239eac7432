"""One rank of the demo: three runs in lockstep, told to the parent as JSON lines.

*main* trains as ZeRO-3, migrates to TP x DP, trains, migrates back, trains. *reference* is the same run
left alone. *control* is *main* with its moments zeroed at the first migration, to show that the
comparison can fail.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import dynadapt
from dynadapt.demo.model import Batches, build_model, tensor_parallel, zero3

if TYPE_CHECKING:
    from dynadapt.elastic.outcome import MigrationReport

STEPS = 8
"""Optimizer steps in each of the three phases."""

EVAL_EVERY = 4


class ZeroRun:
    """Training on a DeepSpeed engine, with the step counters a migration carries along."""

    layout = "ZeRO-3 x 4"

    def __init__(self, engine: Any, batches: Batches) -> None:
        self.state = dynadapt.TrainState(model=engine)
        self._engine, self._batches = engine, batches
        self._rank, self._size = dist.get_rank(), dist.get_world_size()

    def step(self, number: int) -> float:
        """One optimizer step; the loss of the global batch."""
        batch = self._batches.train(number, self._rank, self._size)
        loss = self._engine(input_ids=batch, labels=batch).loss
        self._engine.backward(loss)
        self._engine.step()
        return _mean(loss)

    def evaluate(self) -> float:
        """The loss of the held-out batch."""
        batch = self._batches.held_out(self._rank, self._size)
        self._engine.eval()
        with torch.no_grad():
            loss = self._engine(input_ids=batch, labels=batch).loss
        self._engine.train()
        return _mean(loss)


class TensorParallelRun:
    """Training on DTensors, TP 2 x DP 2; tensor-parallel ranks see the same rows."""

    layout = "TP 2 x DP 2"

    def __init__(self, batches: Batches) -> None:
        self._model, optimizer, mesh = tensor_parallel(build_model(seed=1))
        self.state = dynadapt.TrainState(model=self._model, optimizer=optimizer)
        self._optimizer, self._batches = optimizer, batches
        self._rank, self._size = mesh.get_local_rank("dp"), mesh["dp"].size()

    def step(self, number: int) -> float:
        """One optimizer step; the loss of the global batch."""
        batch = self._batches.train(number, self._rank, self._size)
        loss = self._model(input_ids=batch, labels=batch).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return _mean(loss)

    def evaluate(self) -> float:
        """The loss of the held-out batch."""
        batch = self._batches.held_out(self._rank, self._size)
        self._model.eval()
        with torch.no_grad():
            loss = self._model(input_ids=batch, labels=batch).loss
        self._model.train()
        return _mean(loss)

    def forget_moments(self) -> None:
        """What a conversion that loses optimizer state would do."""
        for state in self._optimizer.state.values():
            state["exp_avg"].zero_()
            state["exp_avg_sq"].zero_()


def _mean(loss: torch.Tensor) -> float:
    """The mean over ranks; each data rank has equally many rows and equally many ranks."""
    value = loss.detach().to(torch.float64)
    dist.all_reduce(value)
    return float(value) / dist.get_world_size()


class Teller:
    """Rank 0 appends events to a file the parent reads; other ranks say nothing."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1) if dist.get_rank() == 0 else None

    def __call__(self, kind: str, **what: Any) -> None:
        """Write one event."""
        if self._file is not None:
            self._file.write(json.dumps({"event": kind, **what}) + "\n")


def _migrate(run: Any, to: Any, tell: Teller) -> MigrationReport:
    phases = lambda name: tell("phase", name=name)  # noqa: E731
    return dynadapt.migrate(run.state, to.state, timeout=60, on_phase=phases)


def train(tell: Teller) -> None:
    """The whole demo on this rank."""
    batches = Batches()
    tell("status", text="building three ZeRO-3 engines")
    reference, main, control_end = (ZeroRun(zero3(build_model()), batches) for _ in range(3))
    tell("status", text="building two TP x DP models")
    middle, control_middle = TensorParallelRun(batches), TensorParallelRun(batches)
    phases: tuple[tuple[Any, Any], ...] = (
        (main, main),
        (middle, control_middle),
        (main, control_end),
    )
    number = 0
    for phase, (run, control) in enumerate(phases):
        if phase:
            before, control_before = phases[phase - 1]
            tell("migrating", source=before.layout, target=run.layout)
            report = _migrate(before, run, tell)
            tell("migrated", report=report.to_json(), source=before.layout, target=run.layout)
            _migrate(control_before, control, lambda *_, **__: None)  # type: ignore[arg-type]
            if phase == 1:
                control_middle.forget_moments()
        for _ in range(STEPS):
            loss = run.step(number)
            tell(
                "step",
                step=number,
                layout=run.layout,
                loss=loss,
                reference=reference.step(number),
                control=control.step(number) if phase else loss,
            )
            number += 1
            if number % EVAL_EVERY == 0:
                held_out, expected = run.evaluate(), reference.evaluate()
                tell("eval", step=number, loss=held_out, reference=expected)
    tell("done")


def main() -> None:
    """Set up gloo from torchrun's environment, train, leave without waiting for threads."""
    torch.set_num_threads(1)
    code = 0
    try:
        dist.init_process_group("gloo")
        train(Teller(Path(sys.argv[1])))
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo may abort at interpreter exit after subgroups; nothing is left to do


if __name__ == "__main__":
    main()
