"""Whether the texts of an exported program are what they should be: names, calls of operators, arithmetic on sizes.

torch finds operators by walking from module to module, evaluates sizes and guards as Python, and writes names into code
that it generates. So what a text may be is said here, and all else is refused.
"""

from __future__ import annotations

import ast
import itertools
import json
import math
import re
from typing import Any

from optexport.errors import SourceError
from optexport.redaction import redact
from optexport.runtime.untrusted import script_code

# Of the operators that call others, those that torch.export writes.
_HIGHER_ORDER = (
    "associative_scan|auto_functionalized(?:_v2)?|autograd_function_apply|cond|flex_attention|hints_wrapper"
    "|invoke_subgraph|map_impl|out_dtype|scan|strict_mode|tag_activation_checkpoint|while_loop|with_effects"
    "|wrap_activation_checkpoint|wrap_with_autocast|wrap_with_set_grad_enabled"
)
# With its overload, which makes it one of torch's operators and no other attribute.
_OPERATOR = re.compile(
    r"torch\.ops\.(?!higher_order\.|__)\w+\.(?:(?!__)\w+|__i?(?:and|or|xor|lshift|rshift)__)\.(?!__)\w+"
    rf"|torch\.ops\.higher_order\.(?:{_HIGHER_ORDER})"
    r"|_operator\.(?:getitem|add|mul|sub|truediv|floordiv|mod|pow|neg|abs|ge|le|gt|lt|eq|ne|and_|or_|not_|[lr]shift)"
    r"|math\.(?:ceil|floor|trunc)|torch\.sym_\w+"
)
# How torch calls the kinds of an argument. Another one might be evaluated in a way that nobody has thought of here.
_KIND = re.compile(
    r"as_(?:none|(?:tensor|int|float|string|bool|sym_int|sym_float|sym_bool|optional_tensor)s?|scalar_type"
    r"|memory_format|layout|device|graph|custom_obj|operator|complex|nested_tensors|(?:int|float)_lists"
    r"|string_to_argument|expr|name)"
)
# The texts that torch keeps and never evaluates: messages, stack traces, the paths of modules.
_FREE_TEXT = ("as_string", "torch_version")
# What is kept by names of the file's own choosing, of which none says what stands behind it.
_BY_NAME = (
    *("tensor_values", "sym_int_values", "sym_bool_values", "sym_float_values", "custom_obj_values"),
    *("as_string_to_argument", "treespec_namedtuple_fields", "range_constraints", "config", "opset_version"),
)
_TREES = ("in_spec", "out_spec")
# What arguments and outputs lie in. torch would import a module for the factory of a defaultdict, and call any class
# for a namedtuple; those of transformers are of classes that it has registered itself.
_CONTAINER = re.compile(
    r"builtins\.(?:dict|list|tuple)|collections\.(?:OrderedDict|deque)|torch\.Size"
    r"|torch\.fx\.immutable_collections\.immutable_(?:list|dict)|transformers\.[\w.]+"
)
# The loader counts up to the number of a size that depends on data, whose name begins so.
_COUNTED = re.compile(r"(?!u|zuf).*|(?:u|zuf)[0-9]{1,6}", re.DOTALL)
_EXPRESSIONS = ("expr_str", "guards_code")
_NAME = re.compile(r"[\w.@:/ +-]*")
# Of weights and modules, which stand in quotes in the code that torch writes, where Python would not take them bare.
_WEIGHTS = ("parameter_name", "buffer_name", "tensor_constant_name", "fqn")
_BARE_OF_QUOTES = re.compile(r"[^\"'\\]*")
# Of values, which become variables in the code that torch writes: a dotted one would be an attribute of torch's own.
_VARIABLES = ("name", "as_name")
# What sizes and guards are made of: the classes of sympy and of torch that stand for arithmetic, and the inputs.
_FUNCTION = re.compile(
    r"Symbol|Integer|Float|Rational|Add|Mul|Pow|Mod|Max|Min|Abs|And|Or|Not|floor|ceiling|sqrt|max|min|Equality"
    r"|Unequality|Eq|Ne|LessThan|StrictLessThan|GreaterThan|StrictGreaterThan|Le|Lt|Ge|Gt|FloorDiv"
    r"|ModularIndexing|Where|PythonMod|CleanDiv|CeilToInt|FloorToInt|CeilDiv|LShift|RShift|PowByNatural"
    r"|FloatPow|FloatTrueDiv|IntTrueDiv|TruncToFloat|TruncToInt|RoundToInt|RoundDecimal|ToFloat|Identity"
    r"|IsNonOverlappingAndDenseIndicator|Piecewise|ExprCondPair"
)
_VALUE = re.compile(r"L|math|true|false|oo|int_oo")
_METHOD = re.compile(r"size|stride|storage_offset|dim|floor|ceil|trunc|sqrt|pow")
_SYNTAX = (
    *(ast.Expression, ast.keyword, ast.Subscript, ast.Tuple, ast.List, ast.Load),
    *(ast.Compare, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.cmpop, ast.boolop, ast.operator, ast.unaryop),
)
_LARGEST_EXPONENT = 64
_MOST_DIGITS = 1000
# What sympy works out as it reads: sums multiplied out, roots of whole numbers, each argument of Max beside each other.
_MOST_TERMS = 1000
_MOST_NODES = 5000
_MOST_COMPARED = 16
_LARGEST_NUMBER = 10**20
_WORD = re.compile(r"[A-Za-z_]\w*|-?\d+(\.\d+)?(e[+-]?\d{1,3})?")
MEND = "Only load files that you or people you trust have made; export the model again from its source."


def check(value: Any, location: str, key: str = "") -> None:
    """Refuses a document of an exported program whose texts are anything else.

    Args:
        key: The name that the value has in the document.

    Raises:
        SourceError: One of them is.
        ValueError, LookupError, TypeError: The document is of another form.
    """
    if isinstance(value, dict) and key in _BY_NAME:
        for name, item in value.items():
            check(name, location, "fqn" if key == "config" else "")
            if key == "range_constraints" and not _COUNTED.fullmatch(name):
                raise SourceError(f"{name} is a size beyond any that torch counts", location=location, hint=MEND)
            check(item, location)
    elif isinstance(value, dict):
        if "inputs" in value and isinstance(target := value.get("target"), str):
            _check_operator(target, location)
            for given in value["inputs"]:
                _check_kinds(given["arg"], location)
        for name, item in value.items():
            check(name, location)
            if name.startswith("as_"):
                _check_kinds(value, location)
            if name == "as_operator" and isinstance(item, str):
                _check_operator(item, location)
            is_free = isinstance(item, str) and name in _FREE_TEXT
            if not is_free and not (name == "metadata" and _is_of_texts(item)):
                check(item, location, name)
    elif isinstance(value, list):
        for item in value:
            check(item, location, key)
    elif isinstance(value, str) and value and key in _TREES:
        version, tree = json.loads(value)
        check(version, location)
        _check_tree(tree, location)
    elif isinstance(value, str) and not _is_plain(value, key):
        shown = redact(value)
        shown = shown if len(shown) <= 200 else f"{shown[:200]}..."
        raise SourceError(f"{shown!r} is neither a name nor a size", location=location, hint=MEND)


def _check_kinds(argument: dict[str, Any], location: str) -> None:
    for kind in argument:
        if not _KIND.fullmatch(kind):
            raise SourceError(f"{kind} is no known kind of an argument", location=location, hint=MEND)


def _is_of_texts(item: Any) -> bool:
    return isinstance(item, dict) and all(isinstance(text, str) for text in item.values())


def _is_plain(text: str, key: str) -> bool:
    if key in _EXPRESSIONS:
        return _is_expression(text)
    if key in _WEIGHTS:
        return text.isprintable() and _BARE_OF_QUOTES.fullmatch(text) is not None
    return re.fullmatch(r"\w*" if key in _VARIABLES else _NAME, text) is not None


def _check_tree(node: Any, location: str) -> None:
    """Refuses what tells how arguments or outputs lie in one another, where torch would import what it names."""
    kind, context = node["type"], node["context"]
    if set(node) != {"type", "context", "children_spec"} or not (kind is None or _CONTAINER.fullmatch(kind)):
        raise SourceError(
            f"its arguments or outputs lie in {kind}, which is no plain container", location=location, hint=MEND
        )
    keys = None if context is None else json.loads(context)
    if any(not isinstance(key, str | int | None) for key in (keys if isinstance(keys, list) else [keys])):
        raise SourceError(f"the keys of its {kind} are no names or numbers", location=location, hint=MEND)
    if kind in ("builtins.dict", "collections.OrderedDict") and len(keys or ()) != len(node["children_spec"]):
        raise SourceError(
            f"a {kind} of its arguments or outputs has too many keys, or too few", location=location, hint=MEND
        )
    check(keys, location)
    for child in node["children_spec"]:
        _check_tree(child, location)


def _check_operator(name: str, location: str) -> None:
    """Refuses what a graph calls, or passes on to be called, where it is no operator that computes."""
    if not _OPERATOR.fullmatch(name):
        raise SourceError(f"its graph calls {name}, which is no operator", location=location, hint=MEND)
    parts = name.split(".")
    if any(map(script_code.forbidden_name, parts, itertools.repeat("."))) or (
        name.startswith("torch.ops.") and script_code.is_forbidden("::".join(parts[2:4]))
    ):
        raise SourceError(f"its graph calls {name}, which does more than compute", location=location, hint=MEND)


def _is_expression(text: str) -> bool:
    """Whether a text is arithmetic on sizes, such as ``Mul(Integer(2), Symbol('s0', integer=True))``."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, MemoryError, RecursionError):  # the last two of brackets in brackets
        return False
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=function):
                allowed = isinstance(function, ast.Name | ast.Attribute)
            case ast.Name(id=name):
                allowed = (_FUNCTION if id(node) in called else _VALUE).fullmatch(name) is not None
            case ast.Attribute(attr=name):
                allowed = _METHOD.fullmatch(name) is not None and id(node) in called
            case ast.Constant(value=str() as word):
                allowed = _WORD.fullmatch(word) is not None
            case ast.Constant(value=value):
                allowed = value is None or isinstance(value, int | float)
            case _:
                allowed = isinstance(node, _SYNTAX)
        if not allowed:
            return False
    try:
        small = len(called) <= _MOST_NODES and not any(map(_is_large, ast.walk(tree)))
        return small and _terms(tree.body) <= _MOST_TERMS and _degree(tree) <= _LARGEST_EXPONENT
    except (ValueError, RecursionError):
        return False


def _is_large(node: ast.AST) -> bool:
    match node:
        case ast.Constant(value=int() | float() as number):
            return abs(number) >= _LARGEST_NUMBER
        case ast.Constant(value=str() as word):
            return re.fullmatch(r"-?\d{21,}", word) is not None
        case ast.Call(func=ast.Name(id="Max" | "Min" | "max" | "min")):
            return _compared(node) > _MOST_COMPARED
    return False


def _compared(node: ast.AST) -> int:
    """How many arguments sympy compares: those of a Max within another are the other's."""
    match node:
        case ast.Call(func=ast.Name(id="Max" | "Min" | "max" | "min"), args=arguments):
            return sum(map(_compared, arguments))
    return 1


def _terms(node: ast.AST) -> int:
    """How many terms an expression has at most when it is multiplied out.

    Raises:
        ValueError: There are too many to work with, or a root is of more than a symbol or a number that stands there.
    """
    operands: list[ast.expr] = []
    match node:
        case ast.Call(func=ast.Name(id="Symbol" | "Integer" | "Float" | "Rational")):
            return 1
        case ast.Call(func=function, args=args):
            operands = [function.value, *args] if isinstance(function, ast.Attribute) else args
        case ast.BinOp(left=left, right=right):
            operands = [left, right]
        case ast.UnaryOp(operand=operand):
            operands = [operand]
        case ast.Compare(left=left, comparators=others):
            operands = [left, *others]
        case ast.BoolOp(values=operands) | ast.Tuple(elts=operands) | ast.List(elts=operands):
            pass
    terms = [_terms(operand) for operand in operands]
    match node:
        case ast.Call(func=ast.Name(id="Mul")) | ast.BinOp(op=ast.Mult() | ast.Div()):
            count = math.prod(terms)
        case (
            ast.Call(
                func=ast.Name(id="Pow" | "PowByNatural" | "FloatPow" | "sqrt") | ast.Attribute(attr="pow" | "sqrt")
            )
            | ast.BinOp(op=ast.Pow())
        ):
            count = _of_power(operands, terms[0])
        case ast.Call(func=ast.Name(id="Max" | "Min" | "FloorDiv" | "Mod" | "PythonMod")) if sum(terms) <= _MOST_TERMS:
            count = max(terms, default=1)  # one of them, or a part of it: a product of such is not multiplied out
        case _:
            count = sum(terms)
    if count > _MOST_TERMS:
        raise ValueError
    return max(1, count)


def _of_power(operands: list[ast.expr], terms: int) -> int:
    """The terms of a power: a whole one is multiplied out, and for a root sympy factors what stands under it."""
    base, *exponents = operands
    match exponents:
        case [ast.Call(func=ast.Name(id="Integer")) | ast.Constant(value=int()) | ast.UnaryOp() as exponent]:
            return int(terms ** min(_number(exponent), _LARGEST_EXPONENT))
    match base:
        case ast.Constant() | ast.Subscript():
            return 1
        case ast.Call(
            func=ast.Attribute() | ast.Name(id="Symbol" | "Integer" | "Float" | "Rational" | "ToFloat" | "Identity")
        ) if terms == 1:
            return 1
    raise ValueError


def _degree(node: ast.AST) -> float:
    """The exponents of powers of powers, multiplied: a tower of them is a small text of a number without end.

    Raises:
        ValueError: An exponent is no number that stands there, or a number has digits without end.
    """
    match node:
        case (
            ast.BinOp(left=base, op=ast.Pow() | ast.LShift(), right=exponent)
            | ast.Call(func=ast.Attribute(attr="pow", value=base), args=[exponent])
            | ast.Call(func=ast.Name(id="Pow" | "PowByNatural" | "FloatPow" | "LShift"), args=[base, exponent])
        ):
            return max(1.0, _number(exponent)) * _degree(base)
        case ast.Call(func=ast.Attribute(attr="pow") | ast.Name(id="Pow" | "PowByNatural" | "FloatPow" | "LShift")):
            raise ValueError
        case ast.Call(func=ast.Name(id="Float"), args=[_, *digits], keywords=more):
            if any(_number(given) > _MOST_DIGITS for given in [*digits, *(keyword.value for keyword in more)]):
                raise ValueError
    return max(map(_degree, ast.iter_child_nodes(node)), default=1.0)


def _number(node: ast.AST) -> float:
    """The size of a number that stands in an expression.

    Raises:
        ValueError: It is none.
    """
    match node:
        case ast.UnaryOp(operand=operand):
            return _number(operand)
        case ast.Call(func=ast.Name(id="Integer" | "Rational" | "Float"), args=[value, *_]):
            return _number(value)
        case ast.Constant(value=int() | float() | str() as number):
            return abs(float(number))
    raise ValueError
