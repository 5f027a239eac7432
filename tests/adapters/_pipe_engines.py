"""Real DeepSpeed pipelines over a small tied model, and the same model in one piece under equal names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tests import _ranks
from tests._deepspeed_gathers import gathered_below_3, joined_stages

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

VOCABULARY, WIDTH, LENGTH, SAMPLES = 13, 6, 5, 2

PRECISIONS: Mapping[str, Mapping[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 2}},
    "fp32": {},
}


@dataclass(frozen=True)
class Setup:
    """How to build a pipeline; `stages` 0: an ordinary engine over the whole model.

    `groups`: `one`, `decay` (biases and gains apart), or `some`, where only the first stages have biases.
    DeepSpeed drops groups without members, and its norm of ZeRO-1 then waits for the other stages for
    ever, since they add up one group after another: `norm` False does without. `named`: the optimizer is
    given names, too. `config` is put into DeepSpeed's.
    """

    stages: int = 2
    stage: int = 1
    dtype: str = "bf16"
    method: str = "parameters"
    tied: bool = True
    groups: str = "decay"
    norm: bool = True
    clip: float = 0.0
    micro_batches: int = 2
    scheduler: bool = False
    seed: int = 0
    frozen: bool = False
    lr: float = 0.01
    fused: bool = False
    named: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)


class Embed(nn.Embedding):
    """The first layer, and, tied, the last one."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY, WIDTH)


class Head(nn.Linear):
    """The last layer where nothing is tied."""

    def __init__(self) -> None:
        super().__init__(WIDTH, VOCABULARY, bias=False)


def head(embed: Embed, x: torch.Tensor) -> torch.Tensor:
    """Logits of the tied embedding."""
    return nn.functional.linear(x, embed.weight)


class Block(nn.Module):
    """Odd widths, a buffer of each kind, biases only where asked."""

    def __init__(self, hidden: int, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, bias=bias)
        self.up = nn.Linear(WIDTH, hidden, bias=bias)
        self.down = nn.Linear(hidden, WIDTH, bias=False)
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.register_buffer("table", torch.arange(hidden), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


BLOCKS = ((7, True), (5, False), (9, True), (3, False))


def blocks(setup: Setup) -> list[tuple[int, bool]]:
    """Hidden widths, and which blocks have biases."""
    if setup.groups == "some":
        return [(hidden, number < 2) for number, (hidden, _) in enumerate(BLOCKS)]
    return list(BLOCKS)


class Stack(nn.Module):
    """The layers of a pipeline in one module, under the names that the pipeline gives them."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.setup = setup
        self.tied_modules = nn.ModuleDict({"embed": Embed()} if setup.tied else {})
        if not setup.tied:
            self.add_module("0", Embed())
        for number, (hidden, bias) in enumerate(blocks(setup)):
            self.add_module(str(1 + number), Block(hidden, bias))
        if not setup.tied:
            self.add_module(str(1 + len(BLOCKS)), Head())

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        embed = self.tied_modules["embed"] if self.setup.tied else self.get_submodule("0")
        x = embed(tokens)
        for number in range(len(BLOCKS)):
            x = self.get_submodule(str(1 + number))(x)
        last = str(1 + len(BLOCKS))
        logits = head(embed, x) if self.setup.tied else self.get_submodule(last)(x)
        return loss_of(logits, labels)


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy in fp32."""
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def stack(setup: Setup) -> Stack:
    """The whole model with the weights of a seed."""
    torch.manual_seed(setup.seed)
    model = Stack(setup)
    if setup.frozen:
        model.get_parameter("2.up.weight").requires_grad_(False)
    return model


def pipeline(setup: Setup) -> Any:
    """This rank's stage, with the weights that `stack` gives."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    layers: list[Any] = [LayerSpec(Block, *args) for args in blocks(setup)]
    if setup.tied:
        first, last = TiedLayerSpec("embed", Embed), TiedLayerSpec("embed", Embed, forward_fn=head)
    else:
        first, last = LayerSpec(Embed), LayerSpec(Head)
    model = PipelineModule(
        [first, *layers, last],
        num_stages=setup.stages,
        loss_fn=loss_of,
        partition_method=setup.method,
    )
    whole = dict(stack(setup).named_parameters())
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(whole[name])
            param.requires_grad_(whole[name].requires_grad)
    return model


def optimizer_of(setup: Setup, model: nn.Module) -> torch.optim.AdamW:
    """AdamW over this rank's parameters."""
    named = dict(model.named_parameters())
    biases = [p for n, p in named.items() if n.endswith("bias") and setup.groups != "one"]
    gains = [p for n, p in named.items() if "norm.weight" in n and setup.groups != "one"]
    rest = [p for p in named.values() if not any(p is each for each in (*biases, *gains))]
    groups: list[dict[str, Any]] = [
        {"params": biases, "weight_decay": 0.0, "lr": 3 * setup.lr},
        {"params": rest, "weight_decay": 0.1},
        {"params": gains, "weight_decay": 0.0, "lr": 2 * setup.lr},
    ]
    groups = [group for group in groups if group["params"]]
    if setup.named:
        name_of = {param: name for name, param in named.items()}
        for group in groups:
            group["params"] = [(name_of[param], param) for param in group["params"]]
    return torch.optim.AdamW(groups, lr=setup.lr, betas=(0.9, 0.95))


def engine_of(setup: Setup) -> Any:
    """A real engine, built beside whatever there is."""
    import deepspeed

    from dynadapt.adapters.live.deepspeed_zero import beside

    if setup.dtype == "fp16":
        _ranks.allow_fp16()
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": setup.micro_batches,
        "gradient_clipping": setup.clip,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": setup.stage,
            "reduce_bucket_size": 1000,
            "allgather_bucket_size": 1000,
            "stage3_param_persistence_threshold": 0,
            "compute_grad_norm": setup.norm,
        },
        **PRECISIONS[setup.dtype],
        **setup.config,
    }
    deepspeed.init_distributed("gloo")
    with beside():
        model = pipeline(setup) if setup.stages else stack(setup)
        optimizer = optimizer_of(setup, model)
        scheduler = None
        if setup.scheduler:
            scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 6)
        with _ranks.taken_for_fused(torch.optim.AdamW if setup.fused else None):
            return deepspeed.initialize(
                model=model,
                optimizer=optimizer,
                lr_scheduler=scheduler,
                config=config,
                dist_init_required=False,
            )[0]


def batches(first: int, place: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches of a data-parallel rank from number `first` on."""
    while True:
        generator = torch.Generator().manual_seed(1000 * first + place)
        shape = (SAMPLES, LENGTH)
        tokens = torch.randint(VOCABULARY, shape, generator=generator)
        yield tokens, torch.randint(VOCABULARY, shape, generator=generator)
        first += 1


def train(engine: Any, step: int, same: bool = False) -> float:
    """One optimizer step; `same`: the same batches on every data-parallel rank."""
    from deepspeed import comm

    from dynadapt.adapters.live.deepspeed_zero import put_in_force

    put_in_force(engine)
    place = 0 if same else comm.get_rank(group=engine.data_parallel_group)
    every = engine.gradient_accumulation_steps()
    data = batches(step * every, place)
    if hasattr(engine, "train_batch"):
        return float(engine.train_batch(data))
    losses = []
    for _ in range(every):
        loss = engine(*next(data))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return sum(losses) / every


def evaluate(engine: Any) -> float:
    """An evaluation, which leaves buffers and gathered weights behind."""
    from deepspeed import comm

    from dynadapt.adapters.live.deepspeed_zero import put_in_force

    put_in_force(engine)
    data = batches(900, comm.get_rank(group=engine.data_parallel_group))
    if hasattr(engine, "eval_batch"):
        return float(engine.eval_batch(data))
    engine.eval()
    with torch.no_grad():
        loss = float(engine(*next(data)))
    engine.train()
    return loss


def tensors(engine: Any) -> dict[tuple[str, str], torch.Tensor]:
    """All states of the whole model on every rank: of each stage by DeepSpeed's own gathers, joined."""
    return joined_stages(gathered_below_3(engine, engine.data_parallel_group))


def differing(a: Mapping[Any, torch.Tensor], b: Mapping[Any, torch.Tensor]) -> list[str]:
    """Keys whose bits differ, or that one does not have."""
    return sorted(
        str(key)
        for key in {*a, *b}
        if key not in a or key not in b or not torch.equal(a[key], b[key])
    )
