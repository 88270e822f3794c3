"""Scalars of HIVM in Python, and how many operations on them a compiler leaves."""

import re
from typing import Any

VALUE = r"%[\w#-]+"
_SAME = ["index_cast", "index_castui", "extsi", "extui", "trunci", "sitofp", "fptosi", "extf", "truncf", "bitcast"]
_INFIX = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^", "shl": "<<", "shrs": ">>"}
_DIVISIONS = ("divsi", "remsi", "divf")
_COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


class UnknownOperation(RuntimeError):
    """HIVM has an operation that cannot be followed yet; the message has its line."""


def name_of(value: str) -> str:
    return "v" + re.sub(r"\W", "_", value[1:])


def names_in(text: str) -> list[str]:
    return [name_of(value) for value in re.findall(VALUE, text)]


def quotient(first: Any, second: Any) -> Any:
    """Rounded towards zero, if both are integers."""
    if isinstance(first, float):
        return first / second if second else 0.0
    whole = abs(first) // abs(second)
    return whole if (first < 0) == (second < 0) else -whole


def remainder(first: int, second: int) -> int:
    return first - second * int(quotient(first, second))


class Scalars:
    """Writes scalars in Python.

    Args:
        maps: of the text, by name.
    """

    def __init__(self, maps: dict[str, str]) -> None:
        self.maps = maps
        self.operations, self.divisions = 0, 0
        self.same: dict[str, str] = {}  # a value that is another one
        self.known: list[dict[tuple[str, ...], str]] = [{}]  # what has been computed, by open region
        self.constants: set[str] = set()
        self.depths: dict[str, int] = {}  # of the loop in which a value changes

    @property
    def depth(self) -> int:
        """Of the loop that is written."""
        raise NotImplementedError

    def value(self, operation: str, target: str, right: str) -> str:
        """What a value is in Python; counts what a compiler would leave of it.

        Args:
            operation: without its dialect.
            target: the name of the value.
            right: the text of the operation.
        """
        names = names_in(right.partition(" : ")[0])
        self._count(operation, target, right, names)
        stem = operation.rstrip("ifu")
        if operation == "constant":
            text = right.split()[1]
            value = (
                text.capitalize() if text in ("true", "false") else text if re.fullmatch(r"[-+.\de]+", text) else "0.0"
            )
        elif operation in ("apply", "min", "max") and "#" in right:
            value = self._affine(right)
            value = value if operation == "apply" else f"{operation}{value}"
        elif operation in _SAME or right.startswith("math."):  # a float decides nothing
            value = names[0]
        elif stem in _INFIX:
            value = f"{names[0]} {_INFIX[stem]} {names[1]}"
        elif operation in ("divsi", "divf", "remsi"):
            value = f"{'remainder' if operation == 'remsi' else 'quotient'}({names[0]}, {names[1]})"
        elif operation in ("cmpi", "cmpf"):
            value = f"{names[0]} {_COMPARED[right.split()[1].rstrip(',')[-2:]]} {names[1]}"
        elif operation == "select":
            value = f"{names[1]} if {names[0]} else {names[2]}"
        elif operation in ("minsi", "maxsi", "minimumf", "maximumf", "minnumf", "maxnumf"):
            value = f"{operation[:3]}({names[0]}, {names[1]})"
        else:
            raise UnknownOperation(right)
        return value

    def _count(self, operation: str, target: str, right: str, names: list[str]) -> None:
        """Count what a compiler leaves: nothing twice, and nothing in a loop that does not change there."""
        names = [self.same.get(name, name) for name in names]
        depth = max((self.depths.get(name, 0) for name in names), default=0)
        self.depths[target] = depth
        key = (operation, right.split()[1], *names)
        known = next((scope[key] for scope in self.known if key in scope), None)
        if operation == "constant":
            self.constants.add(target)
        elif operation == "index_cast" or known is not None:
            self.same[target] = names[0] if known is None else known
        else:
            self.known[-1][key] = target
            self.operations += depth == self.depth
            self.divisions += depth == self.depth and operation in _DIVISIONS and names[1] not in self.constants
            self.divisions += self._affine_divisions(right) if operation == "apply" else 0

    def _affine_divisions(self, right: str) -> int:
        """Divisions by what is no constant, of what changes in this loop."""
        divided = re.findall(r"\(([^()]*)\) floordiv (\w+)", self._affine(right, names=True))
        count = 0
        for numerator, divisor in divided:
            values = [self.same.get(name, name) for name in re.findall(r"v\w+", f"{numerator} {divisor}")]
            changes = max(self.depths.get(value, 0) for value in values) == self.depth
            count += changes and self.same.get(divisor, divisor) not in self.constants and not divisor.isdigit()
        return count

    def _affine(self, right: str, names: bool = False) -> str:
        inputs, outputs = self.maps[right.split("#")[1].split("(")[0]].split(" -> ")
        values = dict(zip(re.findall(r"[sd]\d+", inputs), names_in(right), strict=True))
        text = re.sub(r"[sd]\d+", lambda one: values[one[0]], outputs)
        return text if names else text.replace("floordiv", "//").replace("mod", "%")
