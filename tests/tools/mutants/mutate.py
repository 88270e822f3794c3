"""Which faults in Python: mutmut's operators, and three of ours for whole statements.

mutmut itself runs each mutant behind a function that it puts in place of the real one, and chooses tests by the calls
that it sees in its own process. recfx reads code objects and runs most of its sharded code in other processes, so here
mutmut only says what to change, and ``tests.tools.mutants.run`` changes the files of a copy of the repository.
"""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import libcst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation import mutators
from mutmut.mutation.file_mutation import Mutation, MutationVisitor
from mutmut.mutation.pragma_handling import IgnoredCode


@dataclass(frozen=True)
class Mutant:
    """One fault: the file, the line where it begins, the text before, and what makes the whole text with the fault."""

    path: Path
    line: int
    original: str = field(repr=False)
    make: Callable[[], str] = field(repr=False)

    @property
    def source(self) -> str:
        """The whole text of the file with the fault."""
        return self.make()

    @property
    def difference(self) -> str:
        """The changed lines, as a diff without context."""
        before, after = self.original.splitlines(), self.source.splitlines()
        return "\n".join(difflib.unified_diff(before, after, str(self.path), "mutant", lineterm="", n=0))

    @property
    def change(self) -> str:
        """The changed lines as ``equivalent.txt`` has them: those of the difference, white space apart."""
        return " ".join(" ".join(self.difference.splitlines()[3:]).split())


def _string(node: libcst.BaseString) -> Iterable[libcst.BaseString]:
    """Names and codes; sentences are wording."""
    if isinstance(node, libcst.SimpleString) and " " not in node.value and len(node.value) > 2:
        yield from list(mutators.operator_string(node))[:1]


def _keyword_arguments(node: libcst.Call) -> Iterable[libcst.Call]:
    """A call without one of its keyword arguments; without a positional one most calls fail at once."""
    for position, argument in enumerate(node.args):
        if argument.keyword is not None and argument.keyword.value != "strict":
            left = [other_argument for other, other_argument in enumerate(node.args) if other != position]
            yield node.with_changes(args=left)


def _condition(node: libcst.If | libcst.While) -> Iterable[libcst.If | libcst.While]:
    inner = node.test.with_changes(lpar=[libcst.LeftParen()], rpar=[libcst.RightParen()])
    yield node.with_changes(test=libcst.UnaryOperation(libcst.Not(), inner))


def _statement(node: libcst.SimpleStatementLine) -> Iterable[libcst.SimpleStatementLine]:
    """``pass`` in place of a call whose answer is not used, of an error, or of a write to something that stays."""
    if len(node.body) != 1:
        return
    statement = node.body[0]
    stays = isinstance(statement, libcst.Assign) and any(
        isinstance(target.target, libcst.Attribute | libcst.Subscript) for target in statement.targets
    )
    called = isinstance(statement, libcst.Expr) and isinstance(statement.value, libcst.Call)
    if called and "super().__init__" in libcst.Module([node]).code:
        return
    if stays or called or isinstance(statement, libcst.Raise | libcst.Del):
        yield node.with_changes(body=[libcst.Pass()])


_OPERATORS: mutators.OPERATORS_TYPE = [
    (libcst.BaseNumber, mutators.operator_number),
    (libcst.SimpleString, _string),
    (libcst.Name, mutators.operator_name),
    (libcst.AugAssign, mutators.operator_augmented_assignment),
    (libcst.UnaryOperation, mutators.operator_remove_unary_ops),
    (libcst.Call, _keyword_arguments),
    (libcst.CSTNode, mutators.operator_keywords),
    (libcst.CSTNode, mutators.operator_swap_op),
    (libcst.IfExp, mutators.operator_if_exp),
    (libcst.If, _condition),
    (libcst.While, _condition),
    (libcst.SimpleStatementLine, _statement),
]


class _Visitor(MutationVisitor):
    """mutmut's, but of decorated functions, too, and only inside functions. Errors go as a whole."""

    def __init__(self) -> None:
        super().__init__(_OPERATORS, IgnoredCode(set(), set(), set()))

    def _skip_node_and_children(self, node: libcst.CSTNode) -> bool:
        if isinstance(node, libcst.FunctionDef) and not node.name.value.startswith("__repr"):
            return False
        if isinstance(node, libcst.Raise | libcst.Assert):
            return True
        if isinstance(node, libcst.Arg) and node.keyword is not None and node.keyword.value == "strict":  # zip's
            return True
        return super()._skip_node_and_children(node)


def mutants_of(path: Path) -> list[Mutant]:
    """Every fault that is tried in one file, in the order of its lines."""
    wrapper = MetadataWrapper(libcst.parse_module(path.read_text()))
    visitor = _Visitor()
    module = wrapper.visit(visitor)
    positions = wrapper.resolve(PositionProvider)
    return [
        Mutant(path, position.start.line, module.code, partial(_changed, module, mutation))
        for mutation in visitor.mutations
        if mutation.contained_by_top_level_function is not None
        and (position := positions.get(mutation.original_node)) is not None
    ]


def _changed(module: libcst.Module, mutation: Mutation) -> str:
    changed = module.deep_replace(mutation.original_node, mutation.mutated_node)
    assert isinstance(changed, libcst.Module)
    return changed.code
