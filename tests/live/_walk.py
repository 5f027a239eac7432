"""A walk: a job goes from kind to kind, trains a step in each, and is judged at every hop.

The judges are the frameworks' own gathers before and after, and a plain torch step on what they gathered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import dynadapt
from tests.live import _oracle, jobs
from tests.live.kinds import KINDS, RECIPES, build

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.live.kinds import Job

#: What a job starts with, and no target is built with: hyperparameters have to travel.
HYPER = {"lr": 0.02, "betas": (0.8, 0.9), "weight_decay": 3.0}

#: The same of the model's persistent buffer.
SCALE = (3.0, 4.0, 5.0)

#: How far a step may be from plain torch's. Ranks add up a gradient in another order, or round its parts
#: to 16 bits first (half of the last place is 2e-3 in bfloat16), and Adam passes on what that makes of it.
#: A hyperparameter that stayed behind makes a tenth at least, a step count that is off by one 1e-4 up to
#: the 40th step.
TOLERANCE = {torch.float32: 3e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}

PARTIAL = 4
"""Times that, where partial sums over tensor-parallel ranks are rounded to the kind's dtype."""


def start(recipe: str) -> Job:
    """A plain job that has taken two steps with `HYPER`."""
    job = build("plain", RECIPES[recipe])
    for group in job.state.optimizer.param_groups:
        group.update(_oracle.changed(group, HYPER))
    job.state.model.scale.copy_(torch.tensor(SCALE))
    for number in range(2):
        job.step(number)
    return job


def walk(
    rank: int, world: int, names: Sequence[str], recipe: str, both: bool = True
) -> list[dict[str, Any]]:
    """One answer a hop, from plain through the kinds; stops after a hop that was refused.

    `both`: the source of a hop takes a step after it as well; else it is only gathered again.
    """
    job, taken = start(recipe), 2
    held = job.tensors()
    answers = []
    for name in names:
        source = job
        job, held, answer = _hop(source, held, name, taken, both)
        if hasattr(source.state.model, "destroy") and "refused" not in answer:
            source.state.model.destroy()  # hooks on gradients would hold an engine from C++
        answers.append(answer)
        taken += 1
        if "refused" in answer:
            break
    return answers


def all_wrong(answers: Sequence[Sequence[dict[str, Any]]]) -> list[str]:
    """What is wrong with any hop on any rank, once."""
    return list(
        dict.fromkeys(each for rank in answers for answer in rank for each in wrong(answer))
    )


def _hop(
    job: Job, held: jobs.Tensors, name: str, taken: int, both: bool
) -> tuple[Job, jobs.Tensors, dict[str, Any]]:
    """Migrate a job that holds `held` to a new one of a kind, which takes a step.

    The new job, its tensors after the step, and what was seen.
    """
    answer: dict[str, Any] = {"hop": [job.kind.name, name]}
    recipe = job.recipe
    target = build(name, recipe)
    job.evaluate()
    target.evaluate()
    maps = {"source_map": job.tensor_map, "target_map": target.tensor_map}
    maps = {side: tensor_map for side, tensor_map in maps.items() if tensor_map is not None}
    try:
        report = dynadapt.migrate(job.state, target.state, timeout=60, budget=64 << 10, **maps)
    except dynadapt.MigrationAborted as error:
        if not error.findings:
            raise
        answer["refused"] = [finding.to_json() for finding in error.findings]
    else:
        answer["moved"] = (report.bytes_moved, report.bytes_minimum)
        answer["equal"] = report.fingerprint_source == report.fingerprint_target
        answer["differing"] = jobs.differing(held, target.tensors()) + _buffers(target)
    answer["changed"] = jobs.differing(held, job.tensors())
    if both or "refused" in answer:
        _, answer["source"] = _judged_step(job, held, taken)
    if "refused" not in answer:
        held, answer["target"] = _judged_step(target, held, taken)
    return target, held, answer


def _buffers(job: Job) -> list[str]:
    """The persistent buffers that are not what the job started with, where this rank has any."""
    named = job.module.named_buffers()
    found = [(name, each) for name, each in named if name.rpartition(".")[2] == "scale"]
    return [name for name, each in found if tuple(each.float().tolist()) != SCALE]


def _judged_step(
    job: Job, before: jobs.Tensors, taken: int
) -> tuple[jobs.Tensors, dict[str, float]]:
    """One step of a job that holds `before`: its tensors then, and how far they are from plain torch's."""
    expected, loss = _oracle.step(
        before, job.recipe, HYPER, taken=taken, number=taken, dtype=job.kind.dtype
    )
    own = job.step(taken)
    after = job.tensors()
    return after, {"loss": abs(own - loss), **gaps(expected, after)}


def gaps(expected: jobs.Tensors, found: jobs.Tensors) -> dict[str, float]:
    """The largest distance over all tensors, in parts of the slot's largest change or value."""
    assert sorted(expected) == sorted(found)
    worst: dict[str, float] = {}
    for key, tensor in expected.items():
        slot = key.rpartition("/")[2]
        gap = float((tensor - found[key]).abs().max())
        scale = HYPER["lr"] if slot == "param" else max(float(tensor.abs().max()), 1e-12)
        worst[slot] = max(worst.get(slot, 0.0), gap / scale)
    return worst


def wrong(answer: dict[str, Any]) -> list[str]:
    """What is wrong with one hop; the source of one that was refused must be as it was."""
    found = []
    if "refused" not in answer:
        moved, minimum = answer["moved"]
        found += [f"{moved} bytes moved, of at least {minimum}"] if moved != minimum else []
        found += [] if answer["equal"] else ["the fingerprints differ"]
        found += [f"{name} differs" for name in answer["differing"]]
    found += [f"{name} of the source has changed" for name in answer["changed"]]
    for side, name in zip(("source", "target"), answer["hop"], strict=True):
        most = TOLERANCE[KINDS[name].dtype] * (PARTIAL if name.startswith("autotp") else 1)
        far = {slot: gap for slot, gap in answer.get(side, {}).items() if not gap <= most}
        found += [f"a step of the {side} is {far} from plain torch's"] if far else []
    return [f"{' -> '.join(answer['hop'])}: {each}" for each in found]
