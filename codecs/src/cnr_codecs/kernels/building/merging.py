"""Merges the helpers of a kernel into it, before it is compiled.

numba compiles each helper by itself, optimizes it, makes machine code of it, and then does all of it again for each
function that calls it. Of one function that is done once, which takes half the time. numba's own ``inline="always"``
takes longer than what it saves.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from collections.abc import Callable
from types import FunctionType
from typing import Any

Function = Callable[..., Any]


def merged(function: Function, is_helper: Callable[[object], bool]) -> Function:
    """The function, with the bodies of the helpers that it calls in place of the calls.

    A helper stays a call if it returns before its end, or where Python may not call it, or more than once: behind
    ``and``, ``or`` and ``if``, in the test of a ``while``. Without sources, as in some bundles, all of them do.
    """
    try:
        merger = _Merger(function, is_helper)
        tree = _definition(function)
    except OSError:
        return function
    tree.decorator_list = []
    tree.body = merger.merge(tree.body, function.__globals__, {})
    module = ast.fix_missing_locations(ast.Module([tree], []))
    space: dict[str, Any] = {}
    exec(compile(module, function.__code__.co_filename, "exec", dont_inherit=True), merger.names, space)
    made: Function = space[function.__name__]
    made.__module__ = function.__module__
    return made


def _definition(function: Any) -> ast.FunctionDef:
    lines, first = inspect.getsourcelines(function)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    ast.increment_lineno(tree, first - 1)
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    for argument in definition.args.args:
        argument.annotation = None
    definition.returns = None
    return definition


class _Merger:
    """Copies statements into one function, in which every local name of a helper is used once."""

    def __init__(self, function: Function, is_helper: Callable[[object], bool]) -> None:
        self.names: dict[str, Any] = dict(function.__globals__)
        self._is_helper = is_helper
        self._calls = 0

    def merge(
        self, body: list[ast.stmt], space: dict[str, Any], renamed: dict[str, ast.expr]
    ) -> list[ast.stmt]:
        """Statements of a function whose globals are `space`, with its local names replaced."""
        done: list[ast.stmt] = []
        for statement in body:
            done += self._statement(statement, space, renamed)
        return done

    def _statement(
        self, statement: ast.stmt, space: dict[str, Any], renamed: dict[str, ast.expr]
    ) -> list[ast.stmt]:
        before: list[ast.stmt] = []
        rewriter = _Rewriter(self, space, renamed, before)
        for field, value in ast.iter_fields(statement):
            if field in ("body", "orelse"):
                setattr(statement, field, self.merge(value, space, renamed))
            elif isinstance(value, ast.AST):
                is_repeated = isinstance(statement, ast.While) and field == "test"
                visit = rewriter.visit_uncertain if is_repeated else rewriter.visit
                setattr(statement, field, visit(value))
            elif isinstance(value, list):
                setattr(statement, field, [rewriter.visit(each) for each in value])
        for each in before:
            for node in ast.walk(each):
                ast.copy_location(node, statement)
        return before if _is_docstring(statement) else [*before, statement]  # of a call, nothing is left

    def inline(self, helper: Any, arguments: list[ast.expr], before: list[ast.stmt]) -> ast.expr | None:
        """Put the helper's statements into `before`. What it returns, or None if it must stay a call."""
        function: FunctionType = helper.py_func
        definition = _definition(function)
        body = definition.body[1:] if _is_docstring(definition.body[0]) else definition.body
        result: ast.expr = ast.Constant(None)
        if isinstance(body[-1], ast.Return) and body[-1].value is not None:
            result, body = body[-1].value, body[:-1]
        if any(isinstance(node, ast.Return) for each in body for node in ast.walk(each)):
            return None
        self._calls += 1
        number = self._calls
        stored = {
            node.id
            for each in body
            for node in ast.walk(each)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        renamed: dict[str, ast.expr] = {name: ast.Name(f"{name}_{number}") for name in stored}
        for parameter, argument in zip(definition.args.args, arguments, strict=True):
            if isinstance(argument, ast.Name) and parameter.arg not in stored:
                renamed[parameter.arg] = argument
            else:
                name = f"{parameter.arg}_{number}"
                renamed[parameter.arg] = ast.Name(name)
                before.append(ast.Assign([ast.Name(name, ast.Store())], argument))
        before += self.merge(body, function.__globals__, renamed)
        return _Rewriter(self, function.__globals__, renamed, before).visit(result)  # type: ignore[no-any-return]

    def global_name(self, name: str, value: object) -> str:
        """What a global is called in the merged function; two modules may have different ones of a name."""
        while name in self.names and self.names[name] is not value:
            name += "_"
        self.names[name] = value
        return name

    def is_helper(self, value: object) -> bool:
        return self._is_helper(value)


class _Rewriter(ast.NodeTransformer):
    """Replaces names, and calls of helpers, in one statement; what these do goes `before` it."""

    def __init__(
        self, merger: _Merger, space: dict[str, Any], renamed: dict[str, ast.expr], before: list[ast.stmt]
    ) -> None:
        self._merger, self._space, self._renamed, self._before = merger, space, renamed, before
        self._is_certain = True

    def visit_uncertain(self, node: ast.AST) -> Any:
        """Visit what may be evaluated never, or often. A statement before it is executed once."""
        was_certain, self._is_certain = self._is_certain, False
        visited = self.visit(node)
        self._is_certain = was_certain
        return visited

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        first, *others = node.values
        node.values = [self.visit(first), *(self.visit_uncertain(each) for each in others)]
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        node.left = self.visit(node.left)
        first, *others = node.comparators
        node.comparators = [self.visit(first), *(self.visit_uncertain(each) for each in others)]
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        node.test = self.visit(node.test)
        node.body, node.orelse = self.visit_uncertain(node.body), self.visit_uncertain(node.orelse)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        called = self._space.get(node.func.id) if isinstance(node.func, ast.Name) else None
        node.args = [self.visit(each) for each in node.args]
        if self._is_certain and self._merger.is_helper(called):
            result = self._merger.inline(called, node.args, self._before)
            if result is not None:
                return result
        node.func = self.visit(node.func)
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if (replaced := self._renamed.get(node.id)) is not None:
            if isinstance(replaced, ast.Name):
                return ast.copy_location(ast.Name(replaced.id, node.ctx), node)
            return replaced
        if node.id in self._space and not hasattr(builtins, node.id) and isinstance(node.ctx, ast.Load):
            return ast.copy_location(
                ast.Name(self._merger.global_name(node.id, self._space[node.id]), node.ctx), node
            )
        return node


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
