"""What the word after `--to` may be, and what is said where it may not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dynadapt import offline
from dynadapt.elastic.targets import READ_ONLY, WRITTEN, target_of
from dynadapt.errors import Refused
from dynadapt.registry import format_names
from dynadapt.vps.spec import KINDS
from tests.offline import _plain

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("zero3", ["dp=N is missing", "zero3:dp=4"]),
        ("deepspeed/zero3", ["dp=N is missing", "deepspeed/zero3:dp=4"]),
        ("zero3:sub_group_size=8", ["dp=N is missing", "zero3:dp=4,sub_group_size=8"]),
        ("dcp/fsdp2", ["dp=N is missing", "dcp/fsdp2:dp=4"]),
        ("dcp:dp=2", ["dcp is a format", "write dcp or dcp/fsdp2:dp=2"]),
        ("safetensors:dp=2", ["safetensors is a format", "write safetensors ["]),
        ("fsdp2", ["needs a format", "dcp/fsdp2:dp=2", "accelerate/fsdp2:dp=2"]),
        ("fsdp2:dp=3", ["needs a format", "dcp/fsdp2:dp=3", "trainer/fsdp2:dp=3"]),
        ("hsdp:rep=2,dp=2", ["write dcp/hsdp:rep=2,dp=2 ["]),
        ("ddp:dp=2,tp=2", ["in parts of tp", "dcp/ddp:dp=2", "accelerate/ddp:dp=2"]),
        ("ddp:tp=2", ["in parts of tp", "dcp/ddp:dp=2"]),
        ("safetensor", ["did you mean 'safetensors'"]),
        ("zero", ["neither a format", "did you mean 'zero"]),
        ("megatorn/zero3:dp=2", ["no format is called 'megatorn'"]),
        ("torch/zero3:dp=2", ["has no layout"]),
    ],
)
def test_a_word_that_means_nothing_gets_one_that_does(spec: str, says: list[str]) -> None:
    with pytest.raises(Refused) as refused:
        target_of("out", spec)
    assert refused.value.reason == "bad-spec"
    for each in says:
        assert each in str(refused.value)
    assert not READ_ONLY & set(str(refused.value).replace(",", " ").split())


def test_nothing_names_the_options(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="--like"):
        offline.plan(_plain.Job().save(tmp_path / "a.pt"))


def test_formats_are_written_in_the_layouts_that_are_told(tmp_path: Path) -> None:
    """Each in those of the table, and in no other."""
    assert {*WRITTEN, *READ_ONLY} <= set(format_names())
    source = offline.open(_plain.Job().save(tmp_path / "a.pt"))
    for name, kinds in WRITTEN.items():
        for kind in KINDS:
            spec = f"{name}/{kind}:{'rep=2,' if kind == 'hsdp' else ''}dp=2"
            if kind in kinds:
                offline.plan(source, spec)
            else:
                with pytest.raises(Refused, match="bad-spec"):
                    offline.plan(source, spec)
    for name in READ_ONLY:
        with pytest.raises(Refused, match="not written"):
            offline.plan(source, name)
