"""Draws mutants: single changes of the source, such as a slip of the hand or of thought would make, by a seed."""

import ast
import copy
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

AREAS = {
    "transports": ("transports/*.py",),
    "agreement": (*(f"cluster/{name}.py" for name in ("agreement", "status_board", "waiting")), "async_store/owner.py"),
    "engine": (
        *(f"engine/{name}.py" for name in ("exchange", "pipeline", "values", "plan", "arena")),
        "cluster/background.py",
        *(f"verbs/{name}.py" for name in ("comparison", "join", "operands", "push_pull", "settings", "values")),
    ),
    "placement": ("engine/placement.py", "train/array_location.py"),
    "keys": ("engine/keys.py", "creation.py"),
    "rows": ("sparse/*.py", "memory/row_sparse.py", "verbs/rows.py", "verbs/row_arguments.py"),
    "checkpoint": ("checkpoint/*.py",),
    "compression": ("engine/compression.py", "codecs/*.py", "compute/numba/codecs.py"),
    "asynchronous": ("async_store/async_kvstore.py", "async_store/client.py"),
}
"""What is mutated, in the folder mpikv."""

ON_GPUS = ("transports/nccl.py", "transports/preflight.py", "transports/watchdog.py", "train/array_location.py")
"""Of these, what runs on GPUs only."""

COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv}
COUNTERPARTS = {"min": "max", "max": "min", "any": "all", "all": "any"}
COMMUTATIVE = ("min", "max", "add", "maximum", "minimum", "isdisjoint")
UNTOUCHED = (ast.Assert, ast.JoinedStr, ast.Raise)
"""What serves the type checker or makes the text of a message, as these calls do:"""
TEXTS = ("cast", "repr", "str", "join", "noted")


@dataclass(frozen=True)
class Mutant:
    """One change of one place in a file of the package.

    It is on the lines from the first of its statement to its own last.
    """

    number: int
    area: str
    path: str
    line: int
    last: int
    function: str
    start: int
    end: int
    before: str
    after: str
    turn: int
    """How often the same change was possible before in the file's functions of this name."""

    @property
    def key(self) -> str:
        """Return what tells the mutant from others, also where lines above it come and go."""
        turn = f" ({self.turn + 1})" if self.turn else ""
        return f"{self.path} {self.function}: {self.before} → {self.after}{turn}"

    def applied(self, source: bytes) -> bytes:
        """Return the source of the file with the change in it."""
        return source[: self.start] + self.after.encode() + source[self.end :]


def draw(package: Path, seed: int, count: int) -> list[Mutant]:
    """Return mutants, as many in each area, give or take one."""
    mutants: list[Mutant] = []
    for index, (area, patterns) in enumerate(AREAS.items()):
        paths = sorted(path for pattern in patterns for path in package.glob(pattern))
        possible = [
            (path.relative_to(package).as_posix(), *change)
            for path in paths
            if path.relative_to(package).as_posix() not in ON_GPUS
            for change in changes(path.read_bytes())
        ]
        share = (count * (index + 1)) // len(AREAS) - (count * index) // len(AREAS)
        chosen = sorted(sorted(possible, key=partial(chance, seed))[:share])
        mutants += [Mutant(len(mutants) + place + 1, area, *rest) for place, rest in enumerate(chosen)]
    return mutants


def chance(seed: int, change: tuple[object, ...]) -> bytes:
    """Return a number for a change that depends on what it is, so that a new line of code draws no others."""
    path, _, _, function, _, _, before, after, turn = change
    return hashlib.sha256(f"{seed} {path} {function} {before} {after} {turn}".encode()).digest()


def changes(source: bytes) -> Iterator[tuple[int, int, str, int, int, str, str, int]]:
    """Return what a mutant has beside its number, area and path for each possible change of a source."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    finder, turns = Finder(), Counter[tuple[str, str, str]]()
    finder.visit(ast.parse(source))
    for first, function, node, condition in finder.found:
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        for mutated in [*mutations(node), *([ast.UnaryOp(ast.Not(), node)] if condition else [])]:
            after = ast.unparse(mutated)
            # Parentheses, as the change may bind less closely than what it replaces.
            text = f"({after})" if isinstance(node, ast.expr) and not isinstance(node, ast.Slice) else after
            name = function, ast.unparse(node), text
            yield first, node.end_lineno, function, start, end, *name[1:], turns[name]
            turns[name] += 1


class Finder(ast.NodeVisitor):
    """Lists what stands in the bodies of functions, but for what only makes types or the texts of messages."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str, ast.stmt | ast.expr, bool]] = []
        self.names: list[str] = []
        self.inside = False
        self.first = 0
        self.conditions: set[ast.expr] = set()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.enter(node, inside=False)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name not in ("__repr__", "__str__"):
            self.enter(node, inside=True)

    def enter(self, node: ast.ClassDef | ast.FunctionDef, inside: bool) -> None:
        before = self.inside
        self.names.append(node.name)
        self.inside = inside
        for statement in node.body:
            self.visit(statement)
        self.inside = before
        self.names.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            self.first = node.lineno
        text = isinstance(node, ast.Call) and called(node) in TEXTS
        if self.inside and isinstance(node, (ast.stmt, ast.expr)) and not text:
            self.found.append((self.first, ".".join(self.names), node, node in self.conditions))
        if isinstance(node, (ast.If, ast.While, ast.IfExp)) and is_plain(node.test):
            self.conditions.add(node.test)
        if isinstance(node, ast.comprehension):
            self.conditions.update(filter(is_plain, node.ifs))
        if not isinstance(node, UNTOUCHED) and not text:
            super().visit(node)


def is_plain(node: ast.expr) -> bool:
    """Return whether no other change of the condition negates it."""
    return isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.NamedExpr))


def called(node: ast.AST) -> str:
    """Return the last word of the name of what is called."""
    function = node.func if isinstance(node, ast.Call) else node
    return getattr(function, "attr", getattr(function, "id", ""))


def mutations(node: ast.stmt | ast.expr) -> Iterator[ast.AST]:
    """Return what may stand in place of a statement or an expression."""
    if isinstance(node, ast.stmt):
        yield from statements(node)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield changed(node, ops=[COMPARISONS[type(node.ops[0])]()])
    elif isinstance(node, ast.BoolOp):
        yield changed(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield node.operand
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        yield changed(node, op=ARITHMETIC[type(node.op)]())
    elif isinstance(node, ast.IfExp):
        yield changed(node, body=node.orelse, orelse=node.body)
    elif isinstance(node, ast.Constant):
        yield from constants(node)
    elif isinstance(node, ast.Slice):
        yield from bounds(node)
    elif isinstance(node, ast.Call):
        yield from calls(node)


def changed(node: ast.AST, **fields: object) -> ast.AST:
    """Return a copy with other fields."""
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def statements(node: ast.stmt) -> Iterator[ast.AST]:
    call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    kept = isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Attribute, ast.Subscript))
    early = isinstance(node, ast.Return) and node.value is None
    if call or kept or early or isinstance(node, (ast.Raise, ast.AugAssign)):
        yield ast.Pass()
    elif isinstance(node, ast.Continue):
        yield ast.Break()
    elif isinstance(node, ast.Break):
        yield ast.Continue()


def constants(node: ast.Constant) -> Iterator[ast.AST]:
    if isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node.value, int):
        yield ast.Constant(node.value + 1)
        yield ast.Constant(node.value - 1)


def bounds(node: ast.Slice) -> Iterator[ast.AST]:
    if node.lower is not None:
        yield changed(node, lower=ast.BinOp(node.lower, ast.Add(), ast.Constant(1)))
    if node.upper is not None:
        yield changed(node, upper=ast.BinOp(node.upper, ast.Sub(), ast.Constant(1)))


def calls(node: ast.Call) -> Iterator[ast.AST]:
    if called(node) in COUNTERPARTS and isinstance(node.func, ast.Name):
        yield changed(node, func=ast.Name(COUNTERPARTS[node.func.id]))
    if (
        called(node) not in COMMUTATIVE
        and len(node.args) > 1
        and all(isinstance(each, (ast.Name, ast.Attribute, ast.Subscript)) for each in node.args[:2])
    ):
        yield changed(node, args=[node.args[1], node.args[0], *node.args[2:]])
