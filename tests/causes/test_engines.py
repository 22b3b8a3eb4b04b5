"""Do engines ask what a cause is, and never which one it is? No comparison with an id or a name outside of `causes`.

An id or a name may stand in an engine only where it finds that cause: as the one such argument of a call
(`scene.fault("AR407", ...)`, `find_cause("dead-rank")`), or as one value that is assigned, returned or mapped to
(`cause_id, what = "AR607", ...`). It may not be compared, matched or looked up, and no set, list, tuple of such
literals or keys of a mapping may be made of them. Whatever decides is a trait (causes/cause.py).

Exempt are `causes` and `lab`, whose faults say which cause is the truth.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import allranks
from allranks.causes.book import all_causes
from allranks.causes.cause import Trait

SOURCE = Path(allranks.__file__).parent
EXEMPT = ("causes/", "lab/")
ENGINES = {
    path.relative_to(SOURCE): path.read_text()
    for path in sorted(SOURCE.rglob("*.py"))
    if not str(path.relative_to(SOURCE)).startswith(EXEMPT)
}
LOOKUPS = frozenset(
    ("startswith", "endswith", "removeprefix", "removesuffix", "match", "fullmatch", "search", "get", "pop", "index")
)
"""Methods that compare their first argument."""
NAMES = frozenset(name for cause in all_causes() for name in (cause.name, *cause.aliases))
WORDS = frozenset(name for name in NAMES if "-" not in name)
"""Names that mean more than a cause (`healthy`, `partition`): refused only where the code beside them says `cause`."""
LITERAL = re.compile(rf"""\^?AR\[?[0-9]|(?:{"|".join(map(re.escape, NAMES))})$""")
"""An id (AR407), the beginning of ids (AR4), a label, a name or an alias."""
QUOTED = re.compile(rf"""["'](?:\^?AR\[?[0-9]|(?:{"|".join(map(re.escape, NAMES - WORDS))})["'])""")


def named_literals(tree: ast.Module) -> dict[str, str]:
    """Return the names at the top of a module that stand for the id or name of a cause."""
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and isinstance(node.value.value, str) and LITERAL.match(node.value.value)
    }


@functools.cache
def constants() -> dict[str, dict[str, str]]:
    """Return by module what stands for the id or name of a cause there."""
    found = {path: named_literals(ast.parse(code)) for path, code in ENGINES.items() if QUOTED.search(code)}
    return {f"allranks.{str(path)[:-3].replace('/', '.')}": names for path, names in found.items() if names}


def find_comparisons(code: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the literal of each place where something is decided by the id or name of a cause."""
    tree = ast.parse(code)
    known = named_literals(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (theirs := constants().get(node.module or "")):
            known |= {alias.asname or alias.name: theirs[alias.name] for alias in node.names if alias.name in theirs}

    def literal(node: ast.AST | None) -> str | None:
        text = known.get(node.id) if isinstance(node, ast.Name) else getattr(node, "value", None)
        return text if isinstance(text, str) and LITERAL.match(text) else None

    for node in ast.walk(tree):
        decisive: list[str | None] = []
        match node:
            case ast.Compare():
                decisive = [*map(literal, ast.walk(node))]
            case ast.MatchValue(value=part) | ast.Subscript(slice=part):
                decisive = [literal(part)]
            case ast.Call(func=ast.Attribute(attr=attr), args=[first, *_]) if attr in LOOKUPS:
                decisive = [literal(first)]
            case ast.Call(args=parts):
                decisive = [*map(literal, parts)] if sum(map(bool, map(literal, parts))) > 1 else []
            case ast.Set(elts=parts) | ast.List(elts=parts) | ast.Tuple(elts=parts):
                decisive = [*map(literal, parts)] if all(map(literal, parts)) else []
            case ast.Dict(keys=keys):
                decisive = [*map(literal, keys)]
        texts = {text for text in decisive if text}
        if texts and (texts - WORDS or "cause" in ast.unparse(node)):
            yield node.lineno, min(texts)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "planted",
    [
        'if cause.id == "AR407": pass',
        'if "AR407" != finding.cause_id: pass',
        'if cause.id in ("AR407", "AR590"): pass',
        'if cause.name in {"dead-rank"}: pass',
        'if cause.name == "healthy": pass',
        'if finding.cause == "AR407 dead-rank": pass',
        'if finding.cause.startswith("AR407 "): pass',
        'if finding.cause_id.startswith("AR4"): pass',
        'if re.match("AR4[0-9]{2}", finding.cause_id): pass',
        'if cause_id != find_cause("AR005").id: pass',
        'match cause.name:\n    case "dead-rank": pass',
        '_KILLED = frozenset(("dead-rank", "host-oom-kill"))',
        '_OF_NETWORK = ["AR2"]',
        '_BACKENDS = {"AR403": "gloo"}',
        '_SLOW = "AR417"\nif cause.id == _SLOW: pass',
        "from allranks.wire.accept import FOREIGN\nif rejection.cause_id == FOREIGN: pass",
        'events = logs.of("AR506", "AR507")',
        'note = skipped["AR011"]',
        'note = skipped.get("AR011")',
    ],
)
def test_a_decision_by_a_literal_is_found(planted: str) -> None:
    assert len({line for line, _ in find_comparisons(planted)}) == 1


@pytest.mark.parametrize(
    "allowed",
    [
        'finding = scene.fault("AR407", what, *ranks)',
        'cause_id, what = "AR607", f"{who} got SIGBUS"',
        'cause_id = "AR606" if is_file else "AR408"',
        "def f(): return 'AR407', how, fixes.get(signum)",
        'name = {"TIMEOUT": "time-limit", "NODE_FAIL": "node-failure"}.get(state, "cancelled")',
        'is_partition = key == "partition"',
        "if Trait.ENDS_BY_ITSELF in cause.traits: pass",
        'print("AR502 spawn-inside-srun: start one task per node")',
    ],
)
def test_where_a_cause_is_found_its_id_may_stand(allowed: str) -> None:
    assert list(find_comparisons(allowed)) == []


def test_no_engine_compares_causes_by_id_or_name() -> None:
    imported = re.compile(rf"\b(?:{'|'.join({name for names in constants().values() for name in names})})\b")
    found = [
        f"src/allranks/{path}:{line} compares with {text}: ask for a trait (causes/cause.py)"
        for path, code in ENGINES.items()
        if QUOTED.search(code) or imported.search(code) or "cause.name" in code
        for line, text in find_comparisons(code)
    ]
    assert found == []


def test_each_trait_is_asked_for_by_an_engine_and_belongs_to_a_cause() -> None:
    asked = {name for code in ENGINES.values() for name in re.findall(r"\bTrait\.([A-Z_]+)", code)}
    assert {trait.name for trait in Trait} == asked
    assert {trait for cause in all_causes() for trait in cause.traits} == set(Trait)


def test_each_trait_says_what_it_means_and_who_asks() -> None:
    code = " ".join((SOURCE / "causes/cause.py").read_text().split())
    for trait in Trait:
        assert re.search(rf'{trait.name} = "{trait}" """[^"]+ \([a-z_., ]+\)\."""', code), trait
