"""Changes of a module that are tried one at a time: operators, constants, conditions, results, calls."""

import ast
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

_COMPARE = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change of a module: the text between two offsets becomes another."""

    module: str
    line: int
    start: int
    stop: int
    new: str
    old: str

    @property
    def name(self) -> str:
        def short(text: str) -> str:
            return " ".join(text.split())[:70]

        return f"{self.module}:{self.line} {short(self.old)} -> {short(self.new)}"

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.stop :]


def mutants_of(module: str, source: bytes, skipped: Collection[str] = ()) -> list[Mutant]:
    """Return every change that is tried, none twice; messages, hints, annotations and asserts stay.

    ``skipped`` names functions and classes that stay too.
    """
    finder = _Finder(module, source, skipped)
    finder.visit(ast.parse(source))
    return sorted(dict.fromkeys(finder.found), key=lambda m: (m.start, m.stop, m.new))


class _Finder(ast.NodeVisitor):
    def __init__(self, module: str, source: bytes, skipped: Collection[str]) -> None:
        self.module, self.source, self.skipped, self.found = module, source, skipped, list[Mutant]()
        lines = source.splitlines(keepends=True)
        self.starts = [sum(map(len, lines[:i])) for i in range(len(lines))]

    def add(self, node: Any, new: str) -> None:
        start = self.starts[node.lineno - 1] + node.col_offset
        stop = self.starts[node.end_lineno - 1] + node.end_col_offset
        old = self.source[start:stop].decode()
        self.found.append(Mutant(self.module, node.lineno, start, stop, new, old))

    def text(self, node: ast.AST) -> str:
        return ast.unparse(node)

    # ------------------------------------------------------------- what stays as it is
    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_Raise(self, node: ast.Raise) -> None:
        self.add(node, "pass")

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Import(self, node: ast.Import) -> None:
        pass

    visit_ImportFrom = visit_Import  # type: ignore[assignment]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name in self.skipped:
            return
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        for statement in node.body:
            self.visit(statement)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if node.name in self.skipped:
            return
        for statement in node.body:
            self.visit(statement)

    # ------------------------------------------------------------- what is changed
    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return
        if isinstance(node.value, ast.Call):
            if self.text(node.value.func) in ("say", "print"):
                return
            self.add(node, "pass")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for place, op in enumerate(node.ops):
            if type(op) in _COMPARE:
                ops = [*node.ops]
                ops[place] = _COMPARE[type(op)]()
                self.add(node, f"({self.text(ast.Compare(node.left, ops, node.comparators))})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        is_text = isinstance(node.left, ast.JoinedStr) or isinstance(node.right, ast.JoinedStr)
        if type(node.op) in _ARITHMETIC and not is_text:
            self.add(node, f"({self.text(ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right))})")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if type(node.op) in _ARITHMETIC:
            self.add(node, self.text(ast.AugAssign(node.target, _ARITHMETIC[type(node.op)](), node.value)))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self.add(node, f"({self.text(ast.BoolOp(other, node.values))})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.operand, ast.Constant):
            self.add(node, f"(-{node.operand.value + 1})")  # another dimension, or index
            return
        if isinstance(node.op, ast.Not | ast.Invert | ast.USub):
            self.add(node, f"({self.text(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if node.value is True or node.value is False:
            self.add(node, str(not node.value))
        elif isinstance(node.value, int):
            self.add(node, f"{node.value + 1}")
        elif isinstance(node.value, float):
            self.add(node, f"{node.value * 1.5 + 0.5!r}")

    def visit_If(self, node: ast.If) -> None:
        self._either_way(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._either_way(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._either_way(test)
        self.generic_visit(node)

    def _either_way(self, test: ast.expr) -> None:
        if not isinstance(test, ast.Compare | ast.Constant | ast.UnaryOp):
            self.add(test, f"(not ({self.text(test)}))")
        if isinstance(test, ast.BoolOp | ast.Call):
            self.add(test, "True")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self.add(node, "return None")
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.visit(node.value)
        self.visit(node.slice)

    def visit_Call(self, node: ast.Call) -> None:
        self.visit(node.func)
        for argument in node.args:
            self.visit(argument)
        for keyword in node.keywords:
            if keyword.arg not in ("hint", "what", "strict"):
                self.visit(keyword.value)
