"""Which part of a checkpoint is meant, under which names, and what goes along with it."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

import dynadapt
from dynadapt import offline
from dynadapt.errors import DynadaptError, Refused

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    """A job whose head is its embedding, as a torch file."""
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(5, 3), "up": torch.nn.Linear(3, 4)})
    model["head"] = torch.nn.Linear(3, 5, bias=False)
    model["head"].weight = model["embed"].weight
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    model["head"](
        model["embed"](torch.arange(4)) + model["up"](torch.ones(4, 3)).sum()
    ).sum().backward()
    optimizer.step()
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(tree, tmp_path / "job.pt")
    return tmp_path / "job.pt"


@pytest.mark.parametrize("globs", [{"exclude": ("embed.*",)}, {"include": ("head.*",)}])
def test_a_tied_tensor_stays_under_the_names_that_are_left(
    tied: Path, tmp_path: Path, globs: dict[str, Any]
) -> None:
    dynadapt.convert(tied, tmp_path / "part", "torch", **globs)
    found = torch.load(tmp_path / "part" / "checkpoint.pt", weights_only=True)
    whole = torch.load(tied, weights_only=True)
    assert "embed.weight" not in found["model"]
    assert torch.equal(found["model"]["head.weight"], whole["model"]["embed.weight"])
    again = dynadapt.open(tmp_path / "part")
    assert np.array_equal(
        again.tensors["head.weight/exp_avg"], dynadapt.open(tied).tensors["embed.weight/exp_avg"]
    )
    assert again.scalars["head.weight"] == {"step": 1}
    assert dynadapt.diff(tied, tmp_path / "part", ignore_missing=True).same


def test_two_tensors_do_not_get_one_name(tmp_path: Path) -> None:
    save_file({"a.w": np.ones(3, "f4"), "w": np.zeros(3, "f4")}, tmp_path / "x.safetensors")
    with pytest.raises(Refused, match=r"both a.w/param and w/param") as refused:
        dynadapt.convert(
            tmp_path / "x.safetensors", tmp_path / "y", "safetensors", strip_prefix="a."
        )
    assert refused.value.reason == "duplicate-name"


def test_a_name_stands_in_an_order_once(tmp_path: Path) -> None:
    """Which of its places a loading job's parameter has cannot be told, and flats depend on it."""
    save_file({"a": np.ones(3, "f4"), "b": np.zeros(3, "f4")}, tmp_path / "x.safetensors")
    with pytest.raises(Refused, match="more than once") as refused:
        dynadapt.convert(
            tmp_path / "x.safetensors", tmp_path / "y", "zero3:dp=2", order=("a", "b", "a")
        )
    assert refused.value.reason == "duplicate-name"


def test_names_in_an_order_that_are_not_there_are_told(tied: Path, tmp_path: Path) -> None:
    """In every command; of a tied tensor either name may stand there, and both."""
    order = ["embed.weight", "up.weight", "up.bias"]
    wrong = [*order[:2], "up.biases", "nothing.at.all"]
    calls: list[Callable[[], Any]] = [
        lambda: dynadapt.convert(tied, tmp_path / "x", "zero3:dp=2", order=wrong),
        lambda: dynadapt.convert(dynadapt.open(tied), tmp_path / "x", "zero3:dp=2", order=wrong),
        lambda: offline.plan(tied, "zero3:dp=2", order=wrong),
        lambda: dynadapt.open(tied, order=wrong),
        lambda: dynadapt.diff(tied, tied, order=wrong),
    ]
    for call in calls:
        with pytest.raises(Refused) as refused:
            call()
        assert {(f.reason, f.where) for f in refused.value.findings} == {
            ("no-match", "up.biases"),
            ("no-match", "nothing.at.all"),
        }
        assert "did you mean up.bias?" in str(refused.value)
    dynadapt.convert(tied, tmp_path / "a", "zero3:dp=2", order=[*order, "head.weight"])
    fewer = {"exclude": ["up.bias"], "strip_prefix": "up.", "add_prefix": "net."}
    names = ["net.embed.weight", "net.weight", "net.bias"]  # the last is left out
    dynadapt.convert(tied, tmp_path / "b", "zero3:dp=2", order=names, **fewer)


def test_what_lies_beside_the_weights(tmp_path: Path) -> None:
    source = tmp_path / "hf"
    (source / "additional_chat_templates").mkdir(parents=True)
    save_file({"w": np.ones(3, "f4")}, source / "model.safetensors")
    odd = {"name": "größe", "a_config": None, "b_config": {"dtype": {"c": "float32"}}}
    (source / "config.json").write_text(json.dumps({"dtype": "float32", **odd}))
    along = ("tokenizer.json", "x.tiktoken", "modeling_x.py", "LICENSE")
    more = ("additional_chat_templates/tool.jinja", "optimizer.pt", "zero_to_fp32.py")
    for name in (*along, *more):
        (source / name).write_text("{}")
    report = dynadapt.convert(source, tmp_path / "low", "safetensors", dtype="bf16")
    assert all((tmp_path / "low" / name).exists() for name in (*along, more[0]))
    assert not any((tmp_path / "low" / name).exists() for name in more[1:])
    config = json.loads((tmp_path / "low" / "config.json").read_text())
    assert config == {"dtype": "bfloat16", **odd}
    assert dynadapt.open(tmp_path / "low").keys[0].dtype == "bfloat16"
    assert [(o.path, o.kind) for o in report.outcomes] == [("optimizer.pt", "dropped")]


def _config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_a_config_says_the_dtype_that_is_written(tmp_path: Path, to: str) -> None:
    """Masters of a bf16 model are fp32 on the way back; `from_pretrained(dtype="auto")` must not round it."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**small, **heads)).bfloat16()
    hf, zero, back = (tmp_path / name for name in ("hf", "zero", "back"))
    model.save_pretrained(hf)
    (own,) = {"dtype", "torch_dtype"} & _config(hf).keys()
    dynadapt.convert(hf, zero, "zero3:dp=2", model=hf)
    assert (
        _config(zero)[own] == "bfloat16"
    )  # what the model computes in: DeepSpeed keeps masters apart
    report = dynadapt.convert(zero, back, to, weights_only=True)
    assert _config(back) == {**_config(hf), own: "float32"}
    (told,) = (o for o in report.outcomes if o.path == "config.json")
    assert "says float32" in told.note
    loaded = AutoModelForCausalLM.from_pretrained(back, dtype="auto")
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    low = tmp_path / "low"
    report = dynadapt.convert(hf, low, to)
    assert (low / "config.json").read_bytes() == (hf / "config.json").read_bytes()
    assert not [o for o in report.outcomes if o.path == "config.json"]


@pytest.mark.parametrize("keep", [(), ("*vision*",)])
def test_configs_of_parts_say_the_dtype_of_their_weights(
    tmp_path: Path, keep: tuple[str, ...]
) -> None:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig
    from transformers import LlavaForConditionalGeneration as Llava

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "dtype": "float32"}
    text = LlamaConfig(**small, num_attention_heads=2, num_key_value_heads=2, vocab_size=32)
    vision = CLIPVisionConfig(**small, num_attention_heads=2, image_size=4, patch_size=2)
    model = Llava(LlavaConfig(vision_config=vision, text_config=text, image_token_index=3))
    hf, low = tmp_path / "hf", tmp_path / "low"
    model.save_pretrained(hf)
    parts = ("vision_config", "text_config")
    assert [_config(hf)[part]["dtype"] for part in parts] == ["float32", "float32"]
    dynadapt.convert(hf, low, "safetensors", dtype="bfloat16", keep_dtype=keep)
    assert _config(low)["dtype"] == _config(low)["text_config"]["dtype"] == "bfloat16"
    assert _config(low)["vision_config"]["dtype"] == ("float32" if keep else "bfloat16")
    for spec in dynadapt.open(low).keys:
        kept = keep and "vision" in spec.key.name
        assert spec.dtype == ("float32" if kept else "bfloat16"), spec.key


def test_a_folder_of_an_adapter_is_one_again(tmp_path: Path) -> None:
    """PEFT's, as Trainer saves it; what is not read of it is told."""
    source, low = tmp_path / "adapter", tmp_path / "low"
    source.mkdir()
    save_file({"lora_A.weight": np.ones(3, "f4")}, source / "adapter_model.safetensors")
    for name in ("adapter_config.json", "README.md", "optimizer.pt"):
        (source / name).write_text("{}")
    report = dynadapt.convert(source, low, "safetensors", dtype="bf16")
    assert {p.name for p in low.iterdir()} == {p.name for p in source.iterdir()} - {
        "optimizer.pt"
    } | {"dynadapt.json"}
    assert dynadapt.open(low).keys[0].dtype == "bfloat16"
    assert [(o.path, o.kind) for o in report.outcomes] == [("optimizer.pt", "dropped")]


def test_a_folder_around_checkpoints_says_where_they_are(tmp_path: Path) -> None:
    (tmp_path / "out" / "step5").mkdir(parents=True)
    save_file({"w": np.ones(3, "f4")}, tmp_path / "out" / "step5" / "model.safetensors")
    (tmp_path / "out" / "latest").write_text("step7")
    with pytest.raises(DynadaptError, match=r"'step7', which is no folder.*: step5") as error:
        dynadapt.open(tmp_path / "out")
    assert error.value.reason == "no-adapter"


def test_a_link_that_leads_nowhere_is_there(tmp_path: Path) -> None:
    save_file({"w": np.ones(3, "f4")}, tmp_path / "x.safetensors")
    (tmp_path / "y").symlink_to("nowhere")
    with pytest.raises(Refused) as refused:
        dynadapt.convert(tmp_path / "x.safetensors", tmp_path / "y", "safetensors")
    assert refused.value.reason == "target-exists"
    dynadapt.convert(tmp_path / "x.safetensors", tmp_path / "y", "safetensors", force=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.safetensors", "y"]


@pytest.mark.parametrize(("dtype", "value"), [("fp16", 7e4), ("bf16", 3.4e38)])
def test_a_dtype_makes_no_number_infinite(tmp_path: Path, dtype: str, value: float) -> None:
    save_file(
        {"big": np.array([1, value, np.inf], "f4"), "w": np.ones(2, "f4")},
        tmp_path / "x.safetensors",
    )
    with pytest.raises(Refused, match="1 values of float32 would be infinite") as refused:
        dynadapt.convert(tmp_path / "x.safetensors", tmp_path / "y", "safetensors", dtype=dtype)
    assert refused.value.reason == "narrowing"
    assert not (tmp_path / "y").exists()
    dynadapt.convert(
        tmp_path / "x.safetensors", tmp_path / "y", "safetensors", dtype=dtype, keep_dtype=("big",)
    )
    assert {k.dtype for k in dynadapt.open(tmp_path / "y").keys} >= {"float32"}


@pytest.mark.parametrize(
    ("header", "told"),
    [
        ('{"w":{W[0,8]},"w":{W[8,16]}}', "twice"),
        ('{"w":{W[0,8]},"v":{W[4,12]}}', "two's"),
        ('{"w":{W[4,12]}}', "no tensor's"),
        ('{"w":{W[0,8]}}', "end at byte 8 of 16"),
    ],
)
def test_safetensors_are_as_strict_as_their_own_loader(
    tmp_path: Path, header: str, told: str
) -> None:
    """Overlaps, holes, names that stand twice: `safetensors` loads none of these either."""
    own = header.replace("W", '"dtype":"F32","shape":[2],"data_offsets":').encode()
    data = len(own).to_bytes(8, "little") + own + np.arange(4, dtype="<f4").tobytes()
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(SafetensorError):
        load_file(tmp_path / "x.safetensors")
    with pytest.raises(Refused, match=told):
        dynadapt.open(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("to", "options", "told"),
    [
        ("torch/zero3:dp=2", {}, "has no layout"),
        ("torch", {"max_memory": 1}, "allow at least"),
        ("torch", {"strip_prefix": "model."}, "the prefix of no tensor"),
        ("torch", {"strip_prefix": "w"}, "no name left"),
        ("safetensors", {"dtype": "bf16", "keep_dtype": ("v*",)}, "matches no tensor"),
        ("safetensors", {"include": ("w",), "exclude": ("w",)}, "nothing of the source is left"),
        ("zero3:dp=2", {"dtype": "bf16"}, "masters of zero3:dp=2 are float32"),
        ("universal", {"dtype": "fp16"}, "masters of universal are float32"),
        ("accelerate/zero1:dp=2", {"dtype": "bf16"}, "zero1:dp=2 are float32"),
        ("safetensors", {"keep_dtype": ("w",)}, "and there is none"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused_and_leaves_nothing(
    tmp_path: Path, to: str, options: dict[str, Any], told: str
) -> None:
    save_file({"w": np.ones(3, "f4")}, tmp_path / "x.safetensors")
    with pytest.raises(Refused, match=told) as refused:
        dynadapt.convert(tmp_path / "x.safetensors", tmp_path / "y" / "z", to, **options)
    assert refused.value.reason in {"bad-argument", "bad-spec", "no-match", "max-memory"}
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_tied_tensor_keeps_its_dtype_by_any_of_its_names(tied: Path, tmp_path: Path) -> None:
    dynadapt.convert(tied, tmp_path / "y", "torch", dtype="bf16", keep_dtype=("head.*",))
    found = {str(s.key): s.dtype for s in dynadapt.open(tmp_path / "y").keys}
    assert (found["embed.weight/param"], found["up.weight/param"]) == ("float32", "bfloat16")


def test_force_replaces_checkpoints_and_nothing_else(tmp_path: Path) -> None:
    save_file({"w": np.ones(3, "f4")}, tmp_path / "x.safetensors")
    for name in ("home", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("")
    with pytest.raises(Refused, match="something else than a checkpoint"):
        dynadapt.convert(tmp_path / "x.safetensors", tmp_path / "home", "safetensors", force=True)
    assert [p.name for p in (tmp_path / "home").iterdir()] == ["thesis.tex"]
    thesis = tmp_path / "home" / "thesis.tex"
    with pytest.raises(Refused, match="a file, and no checkpoint"):
        dynadapt.convert(tmp_path / "x.safetensors", thesis, "safetensors", force=True)
    assert thesis.is_file()
    several = tmp_path / "several"
    for tag in ("iter1", "iter2"):
        dynadapt.convert(tmp_path / "x.safetensors", tmp_path / tag, "zero2:dp=1", order=("w",))
        shutil.copytree(tmp_path / tag, several, dirs_exist_ok=True)
        (several / "dynadapt").rename(several / tag)
        (several / "latest").write_text(tag)
    with pytest.raises(Refused, match=r"several checkpoints in it \(iter1, iter2\)"):
        dynadapt.convert(tmp_path / "x.safetensors", several, "safetensors", force=True)
    assert (several / "iter1").is_dir()
    for name in ("empty", "empty"):
        dynadapt.convert(tmp_path / "x.safetensors", tmp_path / name, "safetensors", force=True)
    assert dynadapt.open(tmp_path / "empty").problems() == ()


@pytest.mark.parametrize(
    "to", ["zero0:dp=2", "zero2:dp=2", "zero3:dp=2", "universal", "torch", "dcp"]
)
def test_names_of_any_letters(tmp_path: Path, to: str) -> None:
    model = torch.nn.ModuleDict({"größe_日本": torch.nn.Linear(3, 4), "up": torch.nn.Linear(4, 2)})
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    model["up"](model["größe_日本"](torch.ones(1, 3))).sum().backward()
    optimizer.step()
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(tree, tmp_path / "job.pt")
    report = dynadapt.convert(tmp_path / "job.pt", tmp_path / "new", to)
    assert report.fingerprint == dynadapt.open(tmp_path / "job.pt").fingerprint()
    for path in (tmp_path / "new").rglob("*.pt"):
        torch.load(path, weights_only=False)


class _Schedules:
    @staticmethod
    def steps(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.StepLR:
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    @staticmethod
    def smooth(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.ExponentialLR:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def _job(schedule: Any) -> tuple[Any, Any, Any]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    return model, optimizer, schedule(optimizer)


def _step(job: tuple[Any, Any, Any]) -> float:
    model, optimizer, schedule = job
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    return float(optimizer.param_groups[0]["lr"])


def test_a_schedule_goes_on_where_a_checkpoint_left_it(tmp_path: Path) -> None:
    """A file does not say a schedule's class; what it keeps must be what the job's keeps."""
    old = _job(_Schedules.steps)
    for _ in range(3):
        _step(old)
    model, optimizer, schedule = (each.state_dict() for each in old)
    tree = {"model": model, "optimizer": optimizer, "scheduler": schedule}
    torch.save(tree, tmp_path / "job.pt")
    new, other = _job(_Schedules.steps), _job(_Schedules.smooth)
    report = dynadapt.load(dynadapt.TrainState(*new), tmp_path / "job.pt")
    assert {o.path: o.kind for o in report.outcomes}["scheduler"] == "exact"
    assert [_step(old) for _ in range(4)] == [_step(new) for _ in range(4)]
    report = dynadapt.load(dynadapt.TrainState(*other), tmp_path / "job.pt")
    told = next(o for o in report.outcomes if o.path == "scheduler")
    assert told.kind == "dropped"
    assert "base_lrs, gamma, last_epoch, step_size, the target's is a Exp" in told.note


@pytest.mark.parametrize("to", ["universal", "zero2:dp=2"])
def test_what_a_format_would_round_is_asked_for(tmp_path: Path, to: str) -> None:
    """Formats whose masters are fp32: refused, until `dtype` says so; others keep what there is."""
    weights = {"w": np.array([1 / 3, 2.0]), "v": np.ones(3, "f4")}
    save_file(weights, tmp_path / "x.safetensors")
    with pytest.raises(Refused, match="ask for it by --dtype") as refused:
        dynadapt.convert(tmp_path / "x.safetensors", tmp_path / "y", to, order=["w", "v"])
    assert refused.value.reason == "narrowing"
    words = {"order": ["w", "v"], "dtype": "float32"}
    dynadapt.convert(tmp_path / "x.safetensors", tmp_path / "y", to, **words)
    assert dynadapt.open(tmp_path / "y").tensors["w"][0] == np.float32(1 / 3)
    dynadapt.convert(tmp_path / "x.safetensors", tmp_path / "z", "torch")
    assert dynadapt.open(tmp_path / "z").tensors["w"][0] == 1 / 3
