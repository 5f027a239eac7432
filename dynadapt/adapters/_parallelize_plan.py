"""A plan of `torch.distributed.tensor.parallel.parallelize_module` as rules from names to styles."""

from __future__ import annotations

import difflib
import re
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

from dynadapt.errors import Finding, Refused
from dynadapt.vps.keys import canonical_name
from dynadapt.vps.tp_rules import TpRules

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

__all__ = ["rules_of_parallelize_plan"]


def rules_of_parallelize_plan(plan: Mapping[str, Any] | Any, module: nn.Module) -> TpRules:
    """What `parallelize_module(module, mesh, plan)` cuts; the module may lie on the meta device.

    `plan` is a style or, as there, a mapping from paths of modules with globs to styles: colwise and
    rowwise on `nn.Linear` and `nn.Embedding`; styles that only convert activations cut nothing.

    Raises `Refused` (reason `bad-tp-rule`) with every path that fits no module, and every style that
    torch refuses there, whose cuts are not known, or that tells apart what only a number in the name does.

    >>> from torch import nn
    >>> from torch.distributed.tensor.parallel import RowwiseParallel
    >>> rules_of_parallelize_plan({"0": RowwiseParallel()}, nn.Sequential(nn.Linear(2, 2, bias=False))).styles
    {'*.weight': 'rowwise'}
    """
    styles: dict[str, str] = {}
    findings: list[Finding] = []
    for path, style in plan.items() if hasattr(plan, "items") else [("", plan)]:
        modules = list(_matching(module, path))
        if not modules:
            near = difflib.get_close_matches(path, [n for n, _ in module.named_modules() if n], 1)
            hint = f"did you mean {near[0]!r}?" if near else "name a module of the model"
            findings.append(Finding("bad-tp-rule", path, "fits no module", hint))
        for name, each in modules:
            kind, wrong = _kind(style, each)
            if not wrong and styles.get(name, kind) != kind:
                wrong = f"is cut as {styles[name]} already"
            if wrong:
                fix = "name each linear or embedding module once"
                findings.append(Finding("bad-tp-rule", name or "the module", wrong, fix))
            elif kind:
                styles[name] = kind
    wanted: dict[str, str] = {}
    alike: dict[tuple[str, tuple[int, ...]], tuple[str, str]] = {}
    for name, each in module.named_modules():
        for leaf, param in each.named_parameters(recurse=False):
            full = canonical_name(f"{name}.{leaf}" if name else leaf)
            wanted[full] = styles.get(name, "replicate")
            first, other = alike.setdefault(
                (_pattern(full), tuple(param.shape)), (full, wanted[full])
            )
            if other != wanted[full]:  # a declared layout places these as one family
                cause = (
                    f"is {wanted[full]}, but {first}, which differs in its number only, is {other}"
                )
                findings.append(Finding("bad-tp-rule", full, cause, "cut all layers alike"))
    if findings:
        raise Refused(findings)
    return _rules(wanted)


def _matching(module: nn.Module, path: str, at: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules that a path of globs reaches, segment by segment."""
    if not path:
        yield at, module
        return
    token, _, rest = path.partition(".")
    for name, child in module.named_children():
        if fnmatch(name, token):
            yield from _matching(child, rest, f"{at}.{name}" if at else name)


def _kind(style: Any, module: nn.Module) -> tuple[str, str]:
    """What a torch style does to a module: a rule's style, empty for none; or what is wrong."""
    from torch import nn
    from torch.distributed.tensor import parallel

    embedding, linear = isinstance(module, nn.Embedding), isinstance(module, nn.Linear)
    own = type(style).__name__
    if isinstance(style, (parallel.ColwiseParallel, parallel.RowwiseParallel)):
        word = "colwise" if isinstance(style, parallel.ColwiseParallel) else "rowwise"
        if not (embedding or linear):
            return "", f"{own} takes nn.Linear and nn.Embedding, this is {type(module).__name__}"
        return f"embedding_{word}" if embedding else word, ""
    keeps = (
        parallel.SequenceParallel,
        parallel.PrepareModuleInput,
        parallel.PrepareModuleOutput,
        parallel.PrepareModuleInputOutput,
    )
    return ("", "") if isinstance(style, keeps) else ("", f"what {own} cuts is not known")


def _pattern(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _rules(wanted: Mapping[str, str]) -> TpRules:
    """Rules that give each parameter its style, one for all layers where they are alike."""
    by_pattern: dict[str, dict[str, str]] = {}
    for name, style in wanted.items():
        by_pattern.setdefault(_pattern(name), {})[name] = style
    styles: dict[str, str] = {}
    for pattern, members in by_pattern.items():
        if set(members.values()) != {"replicate"}:
            same = len(set(members.values())) == 1
            styles |= dict.fromkeys([pattern], *set(members.values())) if same else members
    # A pattern fits at the end of a name, so it may fit more than what it was made from.
    rules = TpRules(styles)
    mended = {name: style for name, style in wanted.items() if rules.style(name) != style}
    return TpRules({**styles, **mended}) if mended else rules
