"""Torch pipelines: every way to pass a stage, names, ties over stages, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

import dynadapt
from tests.declared._stages import Deep
from tests.live import jobs
from tests.live._pipeline import TIED, Pipeline
from tests.live.kinds import build

if TYPE_CHECKING:
    from tests._ranks import Pool


def _mesh(pp: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    shape = (pp, dist.get_world_size() // pp)
    return init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp"))


def _refused(source: Any, target: Any, **arguments: Any) -> tuple[str, str]:
    try:
        dynadapt.migrate(source, target, **arguments)
    except dynadapt.MigrationAborted as error:
        return error.reason, str(error)
    return "", "it was not refused"


def _keys(state: Any) -> list[Any]:
    return [(s.key, s.shape, s.aliases) for s in dynadapt.describe(state).layout.keys]


def _every_way(rank: int, world: int) -> dict[str, Any]:
    """The schedule, its stages, their submodules: one state."""
    pipeline = Pipeline(jobs.net(0), _mesh(2), "Interleaved1F1B")
    optimizer = jobs.adamw(pipeline)  # type: ignore[arg-type]
    modules = [stage.submod for stage in pipeline.stages]
    ways = {
        "schedule": pipeline.schedule,
        "stages": pipeline.stages,
        "turned": pipeline.stages[::-1],
        "submodules": modules,
    }
    for number in range(2):
        pipeline.run(jobs.tokens(number))
        optimizer.step()
        optimizer.zero_grad()
    plain = build("plain")
    found = {}
    for name, model in ways.items():
        state = dynadapt.TrainState(model, optimizer, tied=TIED)
        report = dynadapt.migrate(state, plain.state)
        back = Pipeline(jobs.net(3), _mesh(2), "Interleaved1F1B")
        target = dynadapt.TrainState(back.schedule, jobs.adamw(back), tied=TIED)  # type: ignore[arg-type]
        dynadapt.migrate(plain.state, target)
        found[name] = (_keys(state), report.fingerprint_target, dynadapt.fingerprint(target))
    return found


def test_every_way_to_pass_stages(ranks2: Pool) -> None:
    """A schedule, its stages in any order and their submodules are the same state."""
    for answers in ranks2.run(_every_way):
        first = answers["schedule"]
        assert first[1] == first[2]
        assert all(answer == first for answer in answers.values())
        names = [key.name for key, _, _ in first[0]]
        assert "embed.weight" in names
        assert "head.weight" not in names


def _ties(rank: int, world: int) -> dict[str, Any]:
    def make(seed: int, tied: Any = ()) -> Any:
        pipeline = Pipeline(jobs.net(seed), _mesh(2))
        optimizer = jobs.adamw(pipeline)  # type: ignore[arg-type]
        return pipeline, dynadapt.TrainState(pipeline.schedule, optimizer, tied=tied)

    whole = build("plain")
    whole.step(0)
    found: dict[str, Any] = {}
    pipeline, untold = make(1)
    found["untold target"] = _refused(whole.state, untold)
    dynadapt.migrate(whole.state, untold, allow={"tie"})
    found["untold source"] = _refused(untold, build("plain").state)
    told = dynadapt.TrainState(pipeline.schedule, untold.optimizer, tied=TIED)
    found["told source"] = _refused(told, build("plain").state)
    if rank == 0:
        with torch.no_grad():
            pipeline.modules[0].embed.weight[3, 5] += 1
    found["drifted"] = _refused(told, build("plain").state)
    one = jobs.net(1)
    one.head.weight = nn.Parameter(one.head.weight.detach().clone())
    found["on one rank"] = _refused(dynadapt.TrainState(one, tied=TIED), build("plain").state)
    return found


def test_ties_over_stages(ranks2: Pool) -> None:
    """Named, two copies are one tensor with replicas, and compared; not named, they are two."""
    for found in ranks2.run(_ties):
        assert found["told source"] == ("", "it was not refused")
        for case in ("untold target", "untold source"):
            reason, text = found[case]
            assert reason == "tie", text
            assert "TrainState(tied=...)" in text
        reason, text = found["drifted"]
        assert reason == "replicas-differ", text
        assert "embed.weight" in text
        assert found["on one rank"][0] == "tied-apart"


def _clashes(rank: int, world: int) -> list[tuple[str, str]]:
    stages = [nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))]
    buffers = [nn.BatchNorm1d(2), nn.BatchNorm1d(3)]
    for each in buffers:
        each.weight = each.bias = None
    return [_refused(parts, parts) for parts in (stages, buffers)]


def test_two_tensors_of_one_name_are_refused(ranks2: Pool) -> None:
    """Stages that number their layers from zero each do not say which is which."""
    for parameters, buffers in ranks2.run(_clashes):
        assert parameters[0] == buffers[0] == "name-clash"
        assert "0.weight" in parameters[1]
        assert "running_mean" in buffers[1]


class Part(nn.Module):
    """A stage with a table that every stage has a copy of, as rotary embeddings are."""

    def __init__(self, name: str, seed: float) -> None:
        super().__init__()
        self.add_module(name, nn.Linear(2, 2))
        self.register_buffer("table", torch.full((3,), seed), persistent=False)


def _copies(rank: int, world: int) -> list[Any]:
    def parts(seed: float) -> list[nn.Module]:
        return [Part(f"layer{2 * rank + at}", seed) for at in range(2)]

    source, target = parts(1.0), parts(2.0)
    dynadapt.migrate(source, target)
    told = [part.table.tolist() for part in target]
    source[1].table.fill_(7)
    report = dynadapt.migrate(source, target)
    return [told, [o.note for o in report.outcomes if "differ between stages" in o.path]]


def test_buffers_that_every_stage_has_a_copy_of(ranks2: Pool) -> None:
    """All copies are filled; that they differ in the source is told."""
    for told, notes in ranks2.run(_copies):
        assert told == [[1.0] * 3] * 2
        assert len(notes) == 1
        assert "table" in notes[0]


def _scheduled(rank: int, world: int) -> list[Any]:
    """Groups that a stage lacks, each with its rate, and a schedule over them."""

    def scheduled(state: dynadapt.TrainState) -> dynadapt.TrainState:
        for number, group in enumerate(state.optimizer.param_groups):
            group["lr"] = 1e-2 / (number + 1)
        state.scheduler = torch.optim.lr_scheduler.LambdaLR(state.optimizer, lambda n: 0.5**n)
        return state

    source, target, back = build("plain"), build("pp"), build("plain")
    for job in (source, back):
        scheduled(job.state)
    target.optimizer.param_groups[:] = [g for g in target.optimizer.param_groups if g["params"]]
    scheduled(target.state)
    for number in range(2):
        source.step(number)
        source.state.scheduler.step()
    dynadapt.migrate(source.state, target.state)
    rates = [[g["lr"] for g in job.optimizer.param_groups] for job in (source, target)]
    dynadapt.migrate(target.state, back.state)
    losses = []
    for job in (source, back):
        for number in (2, 3):
            losses.append(job.step(number))
            job.state.scheduler.step()
    return [rates, losses, back.state.scheduler.state_dict() == source.state.scheduler.state_dict()]


def test_groups_and_schedules_that_some_stages_lack(ranks2: Pool) -> None:
    """The last stage has matrices only; the schedule's values per group follow."""
    answers = ranks2.run(_scheduled)
    whole, first = answers[0][0]
    assert first == whole
    assert answers[1][0][1] == whole[:1]
    for answer in answers:
        assert answer[1][:2] == answer[1][2:]
        assert answer[2]


def _traced(rank: int, world: int) -> dict[str, Any]:
    """torch's `pipeline` cuts a model at a split point; its stages keep the names."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

    mesh = _mesh(2)
    torch.manual_seed(0)
    model, reference = Deep(), Deep()
    reference.load_state_dict(model.state_dict())
    tokens = torch.randint(11, (2, 3), generator=torch.Generator().manual_seed(1))
    cut = {"layers.2": SplitPoint.BEGINNING}
    pipe = pipeline(model, mb_args=(tokens[:1],), split_spec=cut)
    number = mesh.get_local_rank("pp")
    # The stage is made of the pipe, which has the submodule that was sharded.
    inner = pipe.get_stage_module(number)
    stage = pipe.build_stage(number, torch.device("cpu"), mesh.get_group("pp"))
    if world > 2:
        fully_shard(inner, mesh=mesh["dp"])
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    params = [p for p in stage.submod.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=0.1)
    source = dynadapt.TrainState(schedule, optimizer)
    twin = dynadapt.TrainState(reference, torch.optim.AdamW(reference.parameters(), lr=0.1))
    goal = torch.zeros(2, 3, 11)

    def step_pipe() -> None:
        schedule.step(*((tokens,) if number == 0 else ()), target=goal if number else None)
        optimizer.step()
        optimizer.zero_grad()

    def step_twin() -> float:
        loss = nn.functional.mse_loss(twin.model(tokens), goal)
        loss.backward()
        twin.optimizer.step()
        twin.optimizer.zero_grad()
        return float(loss.detach())

    for _ in range(2):
        step_pipe()
        step_twin()
    torch.manual_seed(5)
    arrived = Deep()
    target = dynadapt.TrainState(arrived, torch.optim.AdamW(arrived.parameters(), lr=0.1))
    dynadapt.migrate(source, target)
    gaps = [
        float((a - b).abs().max())
        for a, b in zip(arrived.parameters(), reference.parameters(), strict=True)
    ]
    report = dynadapt.migrate(twin, source)
    prints = dynadapt.fingerprint(source), dynadapt.fingerprint(twin)
    return {"gap": max(gaps), "prints": prints, "minimal": report.bytes_moved}


def test_stages_of_the_tracer(ranks2: Pool) -> None:
    for answer in ranks2.run(_traced):
        assert answer["gap"] < 1e-5
        assert answer["prints"][0] == answer["prints"][1]


def test_stages_of_the_tracer_under_fsdp2(ranks4: Pool) -> None:
    for answer in ranks4.run(_traced):
        assert answer["gap"] < 1e-5
        assert answer["prints"][0] == answer["prints"][1]
