# SPDX-License-Identifier: Apache-2.0
"""Names, lines and expressions of generated text.

BMv2 computes with numbers of any size and truncates them on assignment. So does plain Python, but under Numba a number
has 64 bits. Therefore every expression carries its range of values. A mask that changes nothing is omitted. An
expression that could exceed 64 bits is refused, unless a mask around it keeps only low bits, which wrap-around leaves
intact.
"""

import keyword
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from dlcp.switch.executor import model
from dlcp.switch.executor.model import Const, Expr, Field, Op, Param, UnsupportedFeatureError, Valid, Variable

MAX_LINES: Final = 20_000
"""Maximum length of generated text: unstructured control flow duplicates code. Not tuned."""

RESERVED: Final = frozenset(
    {
        "p",
        "n",
        "carry",
        "slot",
        "state",
        "now_us",
        "ingress_port",
        "port",
        "enq_us",
        "deq_delta_us",
        "enq_depth",
        "deq_depth",
    }
    | {"np", "registers", "packets_counted", "bytes_counted", "meter_rates", "meter_tokens", "min", "max", "bool"}
)


class Names:
    """Assigns one variable name to each field and each validity bit."""

    def __init__(self) -> None:
        self._names: dict[Variable, str] = {}
        self._taken: set[str] = set(RESERVED)

    def __call__(self, variable: Variable) -> str:
        """Return the variable's name."""
        if variable not in self._names:
            self._names[variable] = self._unique(variable)
        return self._names[variable]

    def give(self, variable: Variable, name: str) -> None:
        """Use a function parameter's name for a variable."""
        self._names[variable] = name

    def _unique(self, variable: Variable) -> str:
        if isinstance(variable, Valid):
            text = f"valid_{variable.header}"
        elif variable.header == "scalars":
            text = variable.name
        else:
            text = f"{variable.header}_{variable.name}"
        text = re.sub(r"\W", "_", text.replace("metadata_t.", "meta_"))
        if not text[0].isalpha() or keyword.iskeyword(text) or re.fullmatch(r"[A-Z]\d+|[a-z]\d*", text):
            text = f"v_{text}"
        name, count = text, 1
        while name in self._taken:
            count += 1
            name = f"{text}_{count}"
        self._taken.add(name)
        return name


class Writer:
    """Collects indented lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._depth = 1

    def __call__(self, line: str) -> None:
        """Add a line."""
        self.lines.append("    " * self._depth + line)
        if len(self.lines) > MAX_LINES:
            raise UnsupportedFeatureError(f"programs of more than {MAX_LINES} lines of generated text", "control")

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Add ``head`` and indent what follows; an empty block becomes ``pass``."""
        self(head)
        start = len(self.lines)
        self._depth += 1
        yield
        if len(self.lines) == start:
            self("pass")
        self._depth -= 1

    def mark(self) -> int:
        """Return a position for `since`."""
        return len(self.lines)

    def since(self, mark: int) -> list[str]:
        """Remove and return the lines after ``mark``."""
        taken = self.lines[mark:]
        del self.lines[mark:]
        return taken

    def indented(self, lines: list[str]) -> None:
        """Add lines returned by `since`, one level deeper."""
        self.lines += [f"    {line}" for line in lines]

    def branch(self, condition: str, then: list[str], otherwise: list[str]) -> None:
        """Add an if with two bodies returned by `since`, omitting empty ones."""
        condition = bare(condition)
        if condition in ("True", "False"):
            self.lines += then if condition == "True" else otherwise
        elif then:
            self(f"if {condition}:")
            self.indented(then)
            if otherwise:
                self("else:")
                self.indented(otherwise)
        elif otherwise:
            self(f"if {negated(condition)}:")
            self.indented(otherwise)


def bare(text: str) -> str:
    """Return an expression without its outermost parentheses."""
    if not text.startswith("("):
        return text
    depth = 0
    for place, sign in enumerate(text):
        depth += (sign == "(") - (sign == ")")
        if depth == 0:
            return text[1:-1] if place == len(text) - 1 else text
    return text


def negated(condition: str) -> str:
    """Return the negation of a condition."""
    if re.fullmatch(r"not \w+", condition):
        return condition[4:]
    return f"not {condition}" if re.fullmatch(r"\w+", condition) else f"not ({condition})"


def at(base: str, offset: int) -> str:
    """Return ``base + offset`` as text; ``base`` is empty for zero."""
    if not base:
        return str(offset)
    return f"{base} + {offset}" if offset else base


LIMIT: Final = 1 << 63
_PYTHON: Final = {"and": "and", "or": "or"}


@dataclass(frozen=True, slots=True)
class Value:
    """The text of a numeric expression, with values between ``low`` and ``high`` inclusive."""

    text: str
    low: int
    high: int

    @property
    def constant(self) -> int | None:
        """The value if it is constant, else None."""
        return self.low if self.low == self.high else None


def number(value: int) -> Value:
    """Return a constant."""
    return Value(str(value) if value < 1 << 10 else hex(value), value, value)


class Expressions:
    """Turns expressions into text.

    Parameters
    ----------
    names
        The variable for each field or validity bit.
    offsets_in_validity
        Headers whose validity variable holds their offset plus one.
    zero
        Fields that are always zero.
    """

    def __init__(
        self, name: Callable[[Variable], str], offsets_in_validity: frozenset[str], zero: frozenset[Field]
    ) -> None:
        self.name = name
        self.offsets_in_validity = offsets_in_validity
        self.zero = zero
        self.bounds: dict[Field, Value] = {}
        """Fields with a known range, within the current straight-line piece of text."""

    def value(self, expression: Expr, where: str, arguments: Sequence[Value] = (), wraps: bool = False) -> Value:
        """Return an expression as a number; set ``wraps`` if only its low 63 bits matter."""
        if isinstance(expression, Const):
            if not -LIMIT <= expression.value < LIMIT:
                raise UnsupportedFeatureError("constants wider than 63 bits", where)
            return number(expression.value)
        if isinstance(expression, Field):
            if expression in self.zero:
                return number(0)
            known = self.bounds.get(expression)
            high = (1 << expression.width) - 1
            return Value(self.name(expression), known.low if known else 0, known.high if known else high)
        if isinstance(expression, Valid):
            text = self.name(expression)
            return Value(f"(1 if {text} else 0)" if expression.header in self.offsets_in_validity else text, 0, 1)
        if isinstance(expression, Param):
            return arguments[expression.index]
        return self._operation(expression, where, arguments, wraps)

    def condition(self, expression: Expr, where: str, arguments: Sequence[Value] = ()) -> str:
        """Return an expression as a condition."""
        if isinstance(expression, Valid):
            return self.name(expression)
        if isinstance(expression, Const):
            return "True" if expression.value else "False"
        if isinstance(expression, Op):
            op, args = expression.op, expression.args
            if op in _PYTHON:
                return f"({self.condition(args[0], where, arguments)} {op} {self.condition(args[1], where, arguments)})"
            if op == "not":
                return f"not {self.condition(args[0], where, arguments)}"
            if op == "d2b":
                return self._nonzero(args[0], where, arguments)
            if op == "?":
                parts = [self.condition(arg, where, arguments) for arg in args]
                return f"({parts[1]} if {parts[0]} else {parts[2]})"
            if op in model.BOOLEAN_OPS:
                return self._comparison(op, args, where, arguments)
        return self._nonzero(expression, where, arguments)

    def _nonzero(self, expression: Expr, where: str, arguments: Sequence[Value]) -> str:
        if isinstance(expression, Op) and expression.op == "b2d":
            return self.condition(expression.args[0], where, arguments)
        value = self.value(expression, where, arguments)
        if value.constant is not None:
            return str(bool(value.constant))
        return value.text

    def _comparison(self, op: str, args: Sequence[Expr], where: str, arguments: Sequence[Value]) -> str:
        if any(is_boolean(arg) for arg in args):
            left, right = (self.condition(arg, where, arguments) for arg in args)
            return f"(bool({left}) {op} bool({right}))"
        left_value, right_value = (self.value(arg, where, arguments) for arg in args)
        if left_value.constant is not None and right_value.constant is not None:
            return str(bool(model.COMPARISONS[op](left_value.constant, right_value.constant)))
        if right_value.constant == 0 and left_value.low >= 0 and op in ("==", "!="):
            return f"not {left_value.text}" if op == "==" else left_value.text
        if right_value.constant == 1 and (left_value.low, left_value.high) == (0, 1) and op in ("==", "!="):
            return left_value.text if op == "==" else f"not {left_value.text}"
        return f"{left_value.text} {op} {right_value.text}"

    def _operation(self, expression: Op, where: str, arguments: Sequence[Value], wraps: bool) -> Value:
        op, args = expression.op, expression.args
        if op == "b2d" or op in model.BOOLEAN_OPS:
            condition = self.condition(args[0] if op == "b2d" else expression, where, arguments)
            if condition in ("True", "False"):
                return number(int(condition == "True"))
            return Value(f"(1 if {condition} else 0)", 0, 1)
        if op == "?":
            condition = self.condition(args[0], where, arguments)
            left, right = (self.value(arg, where, arguments, wraps) for arg in args[1:])
            text = f"({left.text} if {condition} else {right.text})"
            return Value(text, min(left.low, right.low), max(left.high, right.high))
        if op == "&":
            return self._mask(args, where, arguments, wraps)
        if op == "~":
            inner = self.value(args[0], where, arguments, wraps)
            return _checked(Value(f"(~{inner.text})", ~inner.high, ~inner.low), where, wraps)
        exact = op in (">>", "/", "%", "usat_cast")
        left, right = (self.value(arg, where, arguments, wraps and not exact) for arg in args)
        if left.constant is not None and right.constant is not None and op in _FOLD:
            return _checked(number(_FOLD[op](left.constant, right.constant)), where, wraps)
        return _checked(_RULES[op](left, right, where), where, wraps)

    def _mask(self, args: Sequence[Expr], where: str, arguments: Sequence[Value], wraps: bool) -> Value:
        left, right = args
        if isinstance(left, Const):
            left, right = right, left
        if not isinstance(right, Const) or not 0 <= right.value < LIMIT:
            first, second = (self.value(arg, where, arguments, wraps) for arg in args)
            if first.low < 0 or second.low < 0:
                high = first.high if second.low < 0 <= first.low else second.high
                low = 0 if first.low >= 0 or second.low >= 0 else -LIMIT
                return Value(f"({first.text} & {second.text})", low, max(high, first.high if low else 0))
            return Value(f"({first.text} & {second.text})", 0, min(first.high, second.high))
        mask = right.value
        inner = self.value(left, where, arguments, wraps=True)
        if inner.constant is not None:
            return number(inner.constant & mask)
        if inner.low >= 0 and _covers(mask, inner.high):
            return inner
        high = min(mask, inner.high) if inner.low >= 0 else mask
        return Value(f"({inner.text} & {number(mask).text})", 0, high)


def is_boolean(expression: Expr) -> bool:
    """Whether an expression is boolean."""
    if isinstance(expression, Valid):
        return True
    if isinstance(expression, Op):
        return expression.op in model.BOOLEAN_OPS or (expression.op == "?" and is_boolean(expression.args[1]))
    return False


def fit(value: Value, width: int) -> Value:
    """Truncate a value to ``width`` bits, as BMv2 does on assignment to a field."""
    full = (1 << width) - 1
    if value.constant is not None:
        return number(value.constant & full)
    if value.low >= 0 and value.high <= full:
        return value
    return Value(f"{value.text} & {number(full).text}", 0, full)


def _covers(mask: int, high: int) -> bool:
    """Whether ``mask`` keeps every bit of every value up to ``high``."""
    full = (1 << high.bit_length()) - 1
    return mask & full == full


def _checked(value: Value, where: str, wraps: bool) -> Value:
    if wraps or (value.low >= -LIMIT and value.high < LIMIT):
        return value
    raise UnsupportedFeatureError("arithmetic on more than 63 bits", where)


def _add(left: Value, right: Value, where: str) -> Value:
    if left.constant == 0:
        return right
    if right.constant == 0:
        return left
    return Value(f"({left.text} + {right.text})", left.low + right.low, left.high + right.high)


def _subtract(left: Value, right: Value, where: str) -> Value:
    if right.constant == 0:
        return left
    return Value(f"({left.text} - {right.text})", left.low - right.high, left.high - right.low)


def _multiply(left: Value, right: Value, where: str) -> Value:
    products = [a * b for a in (left.low, left.high) for b in (right.low, right.high)]
    return Value(f"({left.text} * {right.text})", min(products), max(products))


def _divide(sign: str) -> Callable[[Value, Value, str], Value]:
    def rule(left: Value, right: Value, where: str) -> Value:
        if right.constant is None or right.constant <= 0 or left.low < 0:
            raise UnsupportedFeatureError("division by anything but a positive constant", where)
        high = left.high // right.constant if sign == "//" else min(left.high, right.constant - 1)
        return Value(f"({left.text} {sign} {right.text})", 0, high)

    return rule


def _shift_left(left: Value, right: Value, where: str) -> Value:
    if left.constant == 0 or right.constant == 0:
        return left
    if right.low < 0 or right.high > LIMIT.bit_length() - 2:
        raise UnsupportedFeatureError("left shifts by more than 62 bits", where)
    return Value(
        f"({left.text} << {right.text})", min(left.low << right.high, left.low), max(left.high << right.high, left.high)
    )


def _shift_right(left: Value, right: Value, where: str) -> Value:
    if right.constant == 0:
        return left
    if left.low < 0 or right.low < 0:
        raise UnsupportedFeatureError("right shifts of negative numbers", where)
    text = f"({left.text} >> {right.text})"
    if right.high > LIMIT.bit_length() - 1:  # processors shift by the low six bits only
        text = f"({left.text} >> {right.text} if {right.text} < 64 else 0)"
    return Value(text, left.low >> right.high, left.high >> right.low)


def _bits(sign: str) -> Callable[[Value, Value, str], Value]:
    def rule(left: Value, right: Value, where: str) -> Value:
        if left.constant == 0:
            return right
        if right.constant == 0:
            return left
        text = f"({left.text} {sign} {right.text})"
        if left.low < 0 or right.low < 0:
            bound = 1 << max(abs(side).bit_length() for side in (left.low, left.high, right.low, right.high))
            return Value(text, -bound, bound - 1)
        low = max(left.low, right.low) if sign == "|" else 0
        return Value(text, low, (1 << max(left.high.bit_length(), right.high.bit_length())) - 1)

    return rule


def _saturate(left: Value, right: Value, where: str) -> Value:
    if right.constant is None:
        raise UnsupportedFeatureError("saturation to a non-constant width", where)
    high = (1 << right.constant) - 1
    return Value(f"min(max({left.text}, 0), {number(high).text})", 0, high)


_RULES: Final[Mapping[str, Callable[[Value, Value, str], Value]]] = {
    "+": _add,
    "-": _subtract,
    "*": _multiply,
    "/": _divide("//"),
    "%": _divide("%"),
    "<<": _shift_left,
    ">>": _shift_right,
    "|": _bits("|"),
    "^": _bits("^"),
    "usat_cast": _saturate,
}

_FOLD: Final[Mapping[str, Callable[[int, int], int]]] = {
    "+": int.__add__,
    "-": int.__sub__,
    "*": int.__mul__,
    "|": int.__or__,
    "^": int.__xor__,
}
