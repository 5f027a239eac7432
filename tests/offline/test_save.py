"""`dynadapt.save`: live jobs of every framework written as checkpoints that DeepSpeed and torch load.

The judges are the frameworks' own loaders, and the run that was saved and went on.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

import dynadapt
from dynadapt.elastic.companions import said_by
from dynadapt.elastic.place import MANIFEST
from tests import _ranks
from tests.live import _walk, jobs
from tests.offline import _live

if TYPE_CHECKING:
    from pathlib import Path


def _saved(
    world: int, kinds: list[str], folder: Path, to: str, **options: Any
) -> list[dict[str, Any]]:
    """Jobs that were saved; each checkpoint is whole, and has the job's tensors and its fingerprint."""
    answers: list[list[dict[str, Any]]] = _ranks.pool(world).run(
        _live.saved, kinds, str(folder), to, options, timeout=400
    )
    for answer in answers[0]:
        found = dynadapt.open(folder / answer["kind"])
        assert not found.problems()
        manifest = json.loads((folder / answer["kind"] / MANIFEST).read_text())
        prints = {found.fingerprint(), manifest["fingerprint"], *answer["fingerprints"]}
        assert len(prints) == 1, answer["kind"]
        if not answer["kind"].startswith(_live.OTHER):
            assert prints == {answer["live"]}, answer["kind"]
        for name, tensor in answer["held"].items():
            if name in found.tensors:
                assert found.tensors[name].tobytes() == tensor.numpy().tobytes(), name
        assert not answer["changed"]
        assert answer["moved"] == 0
        assert not answer["warnings"]
    assert not [name for name in folder.iterdir() if name.name.startswith(".")]
    return answers[0]


def _loaded(
    kind: str, world: int, where: Path, then: dict[str, Any], *, exact: bool, recipe: str = "adamw"
) -> None:
    """DeepSpeed's loader takes it, and goes on as the job that was saved does."""
    answers = _ranks.pool(world).run(
        _live.loaded_by_deepspeed, kind, str(where), recipe, timeout=200
    )
    for answer in answers:
        assert answer["path"]
        told = {"moved": 0, "read": 1, "random": True, "fingerprints": (then["live"],) * 2}
        saved = {**then, "fingerprint": then["live"]}
        assert not _live.wrong(saved, answer | told, 0.0 if exact else _live.far(kind))
        lrs = {group["lr"] for group in answer["hyper"]}
        assert lrs == {_walk.HYPER["lr"]}


def test_fsdp2_goes_on_as_zero3(tmp_path: Path) -> None:
    """Four ranks of FSDP2 written as ZeRO-3 of two: DeepSpeed loads it, and the next steps are equal."""
    (then,) = _saved(4, ["fsdp2"], tmp_path, "zero3:dp=2,sub_group_size=100")
    assert then["outcomes"]["counters"] == "derived"  # FSDP2 counts no steps, its optimizer does
    _loaded("zero3-fp32", 2, tmp_path / "fsdp2", then, exact=True)
    whole = sum(tensor.numel() * 4 for tensor in then["held"].values()) + 3 * 4 * 2
    assert then["written"] == whole  # each element once; the buffer is in both ranks' files


def test_half_precision(tmp_path: Path) -> None:
    """Masters in full, and copies that the format has, rounded."""
    (then,) = _saved(4, ["fsdp2-bf16"], tmp_path, "zero2:dp=4,dtype=bfloat16")
    _loaded("zero2-bf16", 4, tmp_path / "fsdp2-bf16", then, exact=True)


#: All live adapters.
KINDS = [
    *(
        "zero0-bf16",
        "zero1rr-fp32",
        "zero2-bf16",
        "zero3-bf16",
        "fsdp1-FULL_SHARD",
        "fsdp2",
        "hsdp",
    ),
    *("fsdp1-HYBRID_SHARD", "ddp", "ddp-owners", "plain", "tpfsdp", "ppfsdp", "pipe2-zero1-fp32"),
    *("autotp2-zero1-fp32", "fsdp2dim1"),
]


def test_every_live_kind_is_saved(tmp_path: Path) -> None:
    """Under its own fingerprint, with every tensor as its framework gathers it."""
    _saved(4, KINDS, tmp_path, "universal")
    for kind in KINDS[1:]:
        found = dynadapt.open(tmp_path / kind)
        assert {spec.key.slot for spec in found.keys if not spec.derived} == {
            *("param", "exp_avg", "exp_avg_sq", "buffer")
        }
        # a DeepSpeed pipeline has one name for what its stages tie
        assert "head.weight" in found.tensors or kind.startswith("pipe")


def test_from_three_ranks(tmp_path: Path) -> None:
    """Parts that no file of the target has as they are."""
    kinds = ["fsdp2", "zero3-fp32", "fsdp1-SHARD_GRAD_OP", "zero2-fp32"]
    answers = _saved(3, kinds, tmp_path, "zero1:dp=2")
    _loaded("zero1-fp32", 2, tmp_path / "zero3-fp32", answers[1], exact=False)


def test_a_torch_distributed_checkpoint(tmp_path: Path) -> None:
    """ZeRO-3 of four ranks written as FSDP2 of two would write it, and loaded there: equal steps."""
    (then,) = _saved(4, ["zero3-fp32"], tmp_path, "dcp/fsdp2:dp=2")
    where = str(tmp_path / "zero3-fp32")
    answers = _ranks.pool(2).run(_live.loaded, ["fsdp2"], where, "adamw", {}, timeout=200)
    saved = {**then, "fingerprint": then["live"]}
    assert not _live.wrong(saved, answers[0][0], 0.0)


def test_transformers_loads_what_its_models_are_saved_as(tmp_path: Path) -> None:
    """`from_pretrained` of the folder: the config is there, and says what is written."""
    from transformers import AutoModelForCausalLM

    told = _ranks.pool(2).run(_live.saved_for_transformers, str(tmp_path), timeout=300)[0]
    for kind, dtype in (
        *(("zero3", "float32"), ("fsdp2", "float32")),
        *(("ddp", "bfloat16"), ("compiled", "bfloat16")),
    ):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / kind, dtype="auto")
        assert type(loaded).__name__ == "LlamaForCausalLM"
        assert loaded.config.architectures == ["LlamaForCausalLM"]
        assert loaded.generation_config.max_new_tokens == 17
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        half = kind == "zero3"  # DeepSpeed makes masters of weights that it rounded before
        wanted = {
            name: (t.bfloat16() if half else t).to(getattr(torch, dtype))
            for name, t in told["weights"].items()
        }
        assert not jobs.differing(wanted, dict(loaded.state_dict()))
        assert dynadapt.open(tmp_path / kind).format == "safetensors"
        says_else = (told[kind].get("config.json") or ("",))[0] == "derived"  # it said bfloat16
        assert says_else == (dtype == "float32")
    for kind in (
        "renamed",
        "universal",
    ):  # names of no model, files that transformers does not load
        assert not (tmp_path / kind / "config.json").exists()


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # PEFT asks for it
def test_models_whose_configs_say_nothing() -> None:
    """PEFT's layers have other names; what JSON has not is no reason to save nothing."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 12}
    model = LlamaForCausalLM(LlamaConfig(**small, num_attention_heads=2, num_key_value_heads=2))
    assert set(said_by(dynadapt.TrainState(model))) == {"config.json", "generation_config.json"}
    model.config.thing = object()
    assert not said_by(model)
    del model.config.thing
    assert said_by(model)
    assert not said_by(get_peft_model(model, LoraConfig(target_modules=["q_proj"])))
    assert not said_by(jobs.net())
    assert not said_by(None)


def test_a_torch_file(tmp_path: Path) -> None:
    """torch loads it, without pickles, into a plain module and its optimizer."""
    (then,) = _saved(4, ["zero3-fp32"], tmp_path, "torch")
    (file,) = (tmp_path / "zero3-fp32").glob("*.pt")
    tree = torch.load(file, weights_only=True)
    weights = next(v for v in tree.values() if isinstance(v, dict) and "embed.weight" in v)
    model = jobs.net(1)
    model.load_state_dict(weights)
    held = {n: t for n, t in then["held"].items() if n.endswith("/param")}
    assert not jobs.differing(held, jobs.torch_tensors(model, None, ()))


def test_weights_in_another_dtype(tmp_path: Path) -> None:
    (then,) = _ranks.pool(4).run(
        _live.saved,
        ["zero3-fp32"],
        str(tmp_path),
        "safetensors",
        {"dtype": "bfloat16", "keep_dtype": ["norm.*"], "max_shard_size": 600},
        timeout=200,
    )[0]
    found = dynadapt.open(tmp_path / "zero3-fp32")
    dtypes = {spec.key.name: spec.dtype for spec in found.keys}
    assert (dtypes["up.weight"], dtypes["norm.weight"]) == ("bfloat16", "float32")
    wanted = then["held"]["up.weight/param"].to(torch.bfloat16).float()
    assert found.tensors["up.weight"].tobytes() == wanted.numpy().tobytes()
    assert len(found.files) == 2
    assert then["outcomes"]["up.weight/{exp_avg, exp_avg_sq}"] == "dropped"


@pytest.mark.parametrize("phase", ["describe", "prepare", "move", "finish", "certify", "commit"])
@pytest.mark.parametrize("at", [0, 2])
def test_a_rank_that_fails(tmp_path: Path, phase: str, at: int) -> None:
    """All get its error, nothing is left, and the job goes on as the others do."""
    told = _ranks.pool(4).run(
        _live.saved_or_not,
        "zero3-bf16",
        str(tmp_path / "out"),
        ["zero3:dp=2"],
        (at, phase, "raise"),
        {},
        timeout=200,
    )
    for answer in told:
        assert (answer["phase"], answer["seat"] % 4) == (phase, at)
        assert not answer["changed"]
        assert answer["losses"] == told[0]["losses"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("at", "phase"), [(0, "prepare"), (1, "move")])
def test_a_full_disk(tmp_path: Path, at: int, phase: str) -> None:
    """A limit on the size of files in its place, on the rank that makes them and on one that writes."""
    told = _ranks.pool(2).run(
        _live.saved_or_not,
        "fsdp2",
        str(tmp_path / "out"),
        ["zero1:dp=2"],
        (at, phase, "full"),
        {},
        timeout=200,
    )
    for answer in told:
        assert answer["seat"] % 2 == at
        assert answer["reason"] in {"disk-full", "unwritable-file"}
        assert not answer["changed"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("at", [0, 1])
def test_a_rank_that_dies(tmp_path: Path, at: int) -> None:
    """The others name it, and remove what it had begun."""
    with _ranks.spawn_fresh(3) as ranks:
        ranks.start(
            _live.saved_or_not,
            "fsdp2",
            str(tmp_path / "out"),
            ["universal"],
            (at, "move", "die"),
            {},
        )
        outcomes = ranks.outcomes(timeout=120)
    assert outcomes[at].died
    for outcome in outcomes:
        if outcome.rank != at:
            assert outcome.value["reason"] == "seat-lost"
            assert outcome.value["seat"] == at
    assert not list(tmp_path.iterdir())


def test_an_existing_checkpoint(tmp_path: Path) -> None:
    """It is kept, unless it is to be replaced; and then, if that fails at the very end, it is back."""
    there = tmp_path / "out"
    there.mkdir()
    (there / "mine").write_text("precious")
    (there / "dynadapt.json").write_text("{}")  # one that is not whole
    run = _ranks.pool(2).run
    args = ("fsdp2", str(there), ["universal"])
    told = run(_live.saved_or_not, *args, (-1, "", ""), {}, timeout=200)
    assert {answer["reason"] for answer in told} == {"target-exists"}
    told = run(_live.saved_or_not, *args, (1, "commit", "raise"), {"force": True}, timeout=200)
    assert told[0]["left"] == ["out"]
    assert (there / "mine").read_text() == "precious"
    told = run(_live.saved_or_not, *args, (-1, "", ""), {"force": True}, timeout=200)
    assert "reason" not in told[0]
    assert dynadapt.open(there).format == "universal"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_arguments_that_differ_or_do_not_exist(tmp_path: Path) -> None:
    run, where = _ranks.pool(2).run, str(tmp_path / "out")
    none = (-1, "", "")
    args = ("fsdp2", where)
    told = run(_live.saved_or_not, *args, ["universal", "zero1:dp=2"], none, {}, timeout=200)
    assert {answer["reason"] for answer in told} == {"ranks-disagree"}
    told = run(_live.saved_or_not, *args, ["universal", "univresal"], none, {}, timeout=200)
    assert {answer["reason"] for answer in told} == {"bad-spec"}
    assert "did you mean 'universal'" in told[0]["text"]
    told = run(_live.saved_or_not, *args, ["safetensors"], none, {"dtype": "x"}, timeout=200)
    assert {answer["reason"] for answer in told} == {"bad-argument"}
    assert not list(tmp_path.iterdir())


def test_a_replica_that_differs_is_not_written(tmp_path: Path) -> None:
    told = _ranks.pool(2).run(_drifted, str(tmp_path / "out"), timeout=200)
    assert [answer["reason"] for answer in told] == ["replicas-differ"] * 2
    assert "kept" in told[0]
    assert dynadapt.open(tmp_path / "first").tensors["up.bias"][0] == told[0]["kept"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["first"]


def _drifted(rank: int, world: int, where: str) -> dict[str, Any]:
    job = _live.started("ddp")
    told: dict[str, Any] = {}
    bias = job.state.model.module.up.bias
    told["kept"] = float(bias.detach()[0])
    with torch.no_grad():
        bias[0] += rank
    try:
        dynadapt.save(job.state, where, "universal", timeout=30)
    except dynadapt.MigrationAborted as error:
        told["reason"] = error.reason
    first = where.replace("out", "first")
    dynadapt.save(job.state, first, "universal", on_drift="take-first", timeout=30)
    return told
