"""Models of transformers under its own plans and under AutoTP: what is declared from the config alone.

Their plans are the rules, so this proves `from_config` and `tp_rules` as well.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from dynadapt.adapters.model_shapes import from_config, tp_rules
from dynadapt.errors import Refused
from dynadapt.vps.declare import declare
from dynadapt.vps.tp_rules import TpRules
from tests.declared import _worlds
from tests.declared._declared import PARAM, assert_same
from tests.declared._hf import config_of, observe_autotp, observe_hf

if TYPE_CHECKING:
    from pathlib import Path

    from dynadapt.vps.model_shape import ModelShape

#: Model, ranks, what transformers is told, and the layout that this is.
OWN = [
    ("llama", 2, {"tp_size": 2}, "ddp:tp=2"),
    ("llama tied", 3, {"tp_size": 3}, "ddp:tp=3"),
    ("llama odd", 2, {"tp_size": 2}, "ddp:tp=2"),
    ("llama", 4, {"tp_size": 4}, "ddp:tp=4"),
    ("llama", 3, {"fsdp_size": 3}, "fsdp2:dp=3"),
    ("qwen3_moe", 2, {"tp_size": 2}, "ddp:tp=2"),
    ("qwen3_moe", 4, {"tp_size": 2, "fsdp_size": 2}, "fsdp2:dp=2,tp=2"),
    ("qwen3_moe", 2, {"fsdp_size": 2, "ep_size": 2}, "fsdp2:ep=2"),
    ("qwen3_moe", 4, {"fsdp_size": 4, "ep_size": 2}, "fsdp2:dp=2,ep=2"),
]

AUTOTP = [
    ("llama", 2, 2, 1, "zero1:tp=2"),
    ("llama tied", 2, 2, 1, "zero1:tp=2"),
    ("llama", 4, 2, 1, "zero1:dp=2,tp=2"),
    ("llama tied", 4, 2, 3, "zero3:dp=2,tp=2"),
    ("llama", 4, 2, 2, "zero2:dp=2,tp=2"),
    ("llama tied", 4, 2, 0, "zero0:dp=2,tp=2"),
]


def shape_of(kind: str, tp: int) -> ModelShape:
    """From the config. Neither transformers nor AutoTP copies a key-value head that places share."""
    config = config_of(kind)
    model = from_config(config)
    return replace(model, heads={}) if tp > config.num_key_value_heads else model


@pytest.mark.parametrize(("kind", "world", "distributed", "spec"), OWN)
def test_transformers_holds_what_its_plan_says(
    kind: str, world: int, distributed: dict[str, int], spec: str, tmp_path: Path
) -> None:
    observed = _worlds.run(world, observe_hf, kind, str(tmp_path), distributed)
    model = shape_of(kind, distributed.get("tp_size", 1))
    rules = tp_rules(config_of(kind))
    assert_same(declare(spec, model, rules, states=PARAM), observed)


def autotp_rules(kind: str) -> TpRules:
    """AutoTP takes the model's own plan, but leaves embeddings whole unless they are the head's too."""
    config = config_of(kind)
    styles = dict(tp_rules(config).styles)
    if not config.tie_word_embeddings:
        styles = {name: s for name, s in styles.items() if s != "embedding_rowwise"}
    return TpRules(styles)


@pytest.mark.parametrize(("kind", "world", "tp", "stage", "spec"), AUTOTP)
def test_autotp_under_zero_holds_what_is_declared(
    kind: str, world: int, tp: int, stage: int, spec: str
) -> None:
    observed = _worlds.run(world, observe_autotp, kind, tp, stage)
    assert_same(declare(spec, shape_of(kind, tp), autotp_rules(kind), states=PARAM), observed)


def test_autotp_shares_what_is_left_over() -> None:
    """50 rows over 4 are 13, 13, 12, 12, not torch's 13, 13, 13, 11; two heads over 4 are 1, 1, 0, 0.

    Ranks then hold different amounts, so that their flat buffers differ: this is not declared.
    """
    observed = _worlds.run(4, observe_autotp, "llama", 4, 1)
    rows = [{str(row.box) for row in own if row.key.name == "lm_head.weight"} for own in observed]
    assert rows == [{"[0:13,0:24]"}, {"[13:26,0:24]"}, {"[26:38,0:24]"}, {"[38:50,0:24]"}]
    keys = [sum(row.key.name.endswith("k_proj.weight") for row in own) for own in observed]
    assert keys == [2, 2, 0, 0]
    with pytest.raises(Refused, match="cuts it unevenly"):
        declare("zero1:dp=2,tp=4", shape_of("llama", 4), autotp_rules("llama"), states=PARAM)
