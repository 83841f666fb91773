"""Every small change to a source file that ``mutation.py`` tries: one comparison, operator, number, condition, keyword, return value or
statement at a time; text, annotations, assertions, the ``strict`` of ``zip`` and what stands in a ``raise`` are left alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

COMPARISONS = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass
class Mutant:
    """One change: where, what stood there and what stands there now."""

    file: str
    line: int
    column: int
    before: str
    after: str
    scope: str = ""  # the outermost function, by qualified name; empty for what runs at import
    code: CodeType | None = field(default=None, repr=False)
    lines: range = range(0)  # of the statement

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}:{self.column}: {self.before} -> {self.after}"


def changes(node: ast.AST) -> Iterator[ast.AST | None]:
    """What may stand in a node's place; None deletes a statement."""

    def other(**new: Any) -> ast.AST:
        return ast.copy_location(type(node)(**{name: new.get(name, value) for name, value in ast.iter_fields(node)}), node)

    match node:
        case ast.Compare(ops=[op]):
            yield from (other(ops=[kind()]) for kind in COMPARISONS[type(op)])
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                yield from (other(ops=[*ops[:i], kind(), *ops[i + 1 :]]) for kind in COMPARISONS[type(op)])
        case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.AugAssign(op=op) if type(op) in OPERATORS:
            yield other(op=OPERATORS[type(op)]())
        case ast.UnaryOp(operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield other(value=not value)
        case ast.Constant(value=int(value) | float(value)):
            yield other(value=value + 1)
        case ast.If() | ast.While():
            yield other(test=ast.UnaryOp(ast.Not(), node.test))
        case ast.IfExp(body=body, orelse=orelse):
            yield from (body, orelse)
        case ast.comprehension(ifs=[_]):
            yield other(ifs=[])
        case ast.Call(keywords=keywords) if len(keywords) > 0:
            optional = [keyword for keyword in keywords if keyword.arg not in (None, "strict")]
            yield from (other(keywords=[k for k in keywords if k is not gone]) for gone in optional)
        case ast.Return(value=value) if value is not None and not (isinstance(value, ast.Constant) and value.value is None):
            yield other(value=ast.Constant(None))
        case ast.Expr(value=ast.Call() | ast.Tuple()) | ast.Raise():
            yield None


def mutants(path: str) -> list[Mutant]:
    """Every mutant of a file, in the order of its lines."""
    tree = ast.parse((ROOT / path).read_text())
    found: list[Mutant] = []

    def visit(node: Any, scope: str, inside: bool, lines: range) -> None:
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            lines = range(node.lineno, body[0].lineno if body else node.end_lineno + 1)
        for new in changes(node):
            changed = new if new is not None else ast.copy_location(ast.Pass(), node)
            texts = first_line(ast.unparse(node)), first_line(ast.unparse(changed))
            line, column, kept = getattr(node, "lineno", lines.start), getattr(node, "col_offset", 0), (type(node), vars(node))
            node.__class__, node.__dict__ = type(changed), vars(changed)  # in its place
            code = compile(ast.fix_missing_locations(tree), str(ROOT / path), "exec")
            node.__class__, node.__dict__ = kept
            found.append(Mutant(path, line, column, *texts, scope if inside else "", code, lines))
        if isinstance(node, ast.Raise):  # what it says is text
            return
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not inside:
            scope = f"{scope}.{node.name}".lstrip(".")
        for name, value in ast.iter_fields(node):
            if isinstance(node, ast.Assert) or name in ("annotation", "returns") or getattr(node, "arg", "") == "strict":
                continue
            if isinstance(node, ast.FunctionDef):  # its defaults and decorators run where it is defined
                here = (scope, True) if name == "body" else (scope if inside else scope.rpartition(".")[0], inside)
            else:
                here = scope, inside
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child, *here, lines)

    visit(tree, "", False, range(0))
    return found


def first_line(text: str) -> str:
    line = text.split("\n", 1)[0]
    return line if len(line) <= 160 else line[:157] + "..."
