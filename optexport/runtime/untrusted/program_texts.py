"""Checks the texts of an exported program: names, calls of operators, and expressions.

``torch.export.load`` looks up operators as attributes of modules, evaluates sizes and guards as Python, and writes
names into generated code. This module lists the texts that are allowed; it refuses every other text.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
from typing import Any

from optexport.errors import SourceError
from optexport.redaction import redact
from optexport.runtime.untrusted import script_code

# The higher-order operators that torch.export writes.
_HIGHER_ORDER = (
    "associative_scan|auto_functionalized(?:_v2)?|autograd_function_apply|cond|flex_attention|hints_wrapper"
    "|invoke_subgraph|map_impl|out_dtype|scan|strict_mode|tag_activation_checkpoint|while_loop|with_effects"
    "|wrap_activation_checkpoint|wrap_with_autocast|wrap_with_set_grad_enabled"
)
# The overload is required: it makes the name an operator of torch and no other attribute.
_OPERATOR = re.compile(
    r"torch\.ops\.(?!higher_order\.|__)\w+\.(?:(?!__)\w+|__i?(?:and|or|xor|lshift|rshift)__)\.(?!__)\w+"
    rf"|torch\.ops\.higher_order\.(?:{_HIGHER_ORDER})"
    r"|_operator\.(?:getitem|add|mul|sub|truediv|floordiv|mod|pow|neg|abs|ge|le|gt|lt|eq|ne|and_|or_|not_|[lr]shift)"
    r"|math\.(?:ceil|floor|trunc)|torch\.sym_\w+"
)
# The argument kinds of torch's schema. A new kind may be evaluated, so it needs a review before it is added here.
_ARGUMENT_KIND = re.compile(
    r"as_(?:none|(?:tensor|int|float|string|bool|sym_int|sym_float|sym_bool|optional_tensor)s?|scalar_type"
    r"|memory_format|layout|device|graph|custom_obj|operator|complex|nested_tensors|(?:int|float)_lists"
    r"|string_to_argument|expr|name)"
)
# torch keeps these texts and never evaluates them: messages, stack traces, paths of modules.
_FREE_TEXT = ("as_string", "torch_version")
# The keys of these tables are names that the file chooses, not fields of the schema.
_TABLES_BY_NAME = (
    *("tensor_values", "sym_int_values", "sym_bool_values", "sym_float_values", "custom_obj_values"),
    *("as_string_to_argument", "treespec_namedtuple_fields", "range_constraints", "config", "opset_version"),
)
_TREES = ("in_spec", "out_spec")
# torch imports a module for the factory of a defaultdict and calls any class for a namedtuple, so both are refused.
# Containers of transformers are classes that transformers itself registered.
_CONTAINER = re.compile(
    r"builtins\.(?:dict|list|tuple)|collections\.(?:OrderedDict|deque)|torch\.Size"
    r"|torch\.fx\.immutable_collections\.immutable_(?:list|dict)|transformers\.[\w.]+"
)
_EXPRESSIONS = ("expr_str", "guards_code")
_NAME = re.compile(r"[\w.@:/ +-]*")
# torch quotes the names of weights and modules in the code that it writes.
_WEIGHTS = ("parameter_name", "buffer_name", "tensor_constant_name", "fqn")
_WITHOUT_QUOTES = re.compile(r"[^\"'\\]*")
# torch makes variables of these names in the code that it writes. A dotted name would be an attribute of torch.
_VARIABLES = ("name", "as_name")
# Sizes and guards consist of sympy's and torch's classes for arithmetic, and of the inputs.
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
_WORD = re.compile(r"[A-Za-z_]\w*|-?\d+(\.\d+)?(e[+-]?\d{1,3})?")
HINT = "Export the model again from its source. Only load files from people you trust."


def check(value: Any, location: str, key: str = "") -> None:
    """Refuses a document of an exported program if one of its texts is not allowed.

    Args:
        value: The document, or a part of it.
        location: Location for the error message.
        key: The key of the value in the document.

    Raises:
        SourceError: A text is not allowed.
        ValueError, LookupError, TypeError: The document does not follow torch's schema.
    """
    if isinstance(value, dict) and key in _TABLES_BY_NAME:
        for name, item in value.items():
            check(name, location, "fqn" if key == "config" else "")
            check(item, location)
    elif isinstance(value, dict):
        _check_record(value, location)
    elif isinstance(value, list):
        for item in value:
            check(item, location, key)
    elif isinstance(value, str) and value and key in _TREES:
        version, tree = json.loads(value)
        check(version, location)
        _check_tree(tree, location)
    elif isinstance(value, str) and not _is_allowed(value, key):
        shown = redact(value)
        shown = shown if len(shown) <= 200 else f"{shown[:200]}..."
        raise SourceError(
            f"the file contains the text {shown!r}, where only names and sizes are allowed",
            location=location,
            hint=HINT,
        )


def _check_record(record: dict[str, Any], location: str) -> None:
    if "inputs" in record and isinstance(target := record.get("target"), str):
        _check_operator(target, location)
        for argument in record["inputs"]:
            _check_argument_kinds(argument["arg"], location)
    for name, item in record.items():
        check(name, location)
        if name.startswith("as_"):
            _check_argument_kinds(record, location)
        if name == "as_operator" and isinstance(item, str):
            _check_operator(item, location)
        is_free = isinstance(item, str) and name in _FREE_TEXT
        if not is_free and not (name == "metadata" and _is_table_of_texts(item)):
            check(item, location, name)


def _check_argument_kinds(argument: dict[str, Any], location: str) -> None:
    for kind in argument:
        if not _ARGUMENT_KIND.fullmatch(kind):
            raise SourceError(f"unknown kind of argument: {kind}", location=location, hint=HINT)


def _is_table_of_texts(item: Any) -> bool:
    return isinstance(item, dict) and all(isinstance(text, str) for text in item.values())


def _is_allowed(text: str, key: str) -> bool:
    if key in _EXPRESSIONS:
        return _is_expression(text)
    if key in _WEIGHTS:
        return text.isprintable() and _WITHOUT_QUOTES.fullmatch(text) is not None
    return re.fullmatch(r"\w*" if key in _VARIABLES else _NAME, text) is not None


def _check_tree(node: Any, location: str) -> None:
    """Refuses a tree of arguments or outputs that would make torch import a module."""
    kind, context = node["type"], node["context"]
    if set(node) != {"type", "context", "children_spec"} or not (kind is None or _CONTAINER.fullmatch(kind)):
        raise SourceError(
            f"the arguments or outputs use {kind}, which is not a plain container", location=location, hint=HINT
        )
    keys = None if context is None else json.loads(context)
    if any(not isinstance(key, str | int | None) for key in (keys if isinstance(keys, list) else [keys])):
        raise SourceError(f"the keys of a {kind} are neither names nor numbers", location=location, hint=HINT)
    if kind in ("builtins.dict", "collections.OrderedDict") and len(keys or ()) != len(node["children_spec"]):
        raise SourceError(
            f"a {kind} in the arguments or outputs has the wrong number of keys", location=location, hint=HINT
        )
    check(keys, location)
    for child in node["children_spec"]:
        _check_tree(child, location)


def _check_operator(name: str, location: str) -> None:
    """Refuses the name of a called function unless it is an operator that only computes."""
    if not _OPERATOR.fullmatch(name):
        raise SourceError(f"the graph calls {name}, which is not an operator", location=location, hint=HINT)
    parts = name.split(".")
    if any(map(script_code.find_forbidden_name, parts, itertools.repeat("."))) or (
        name.startswith("torch.ops.") and script_code.is_forbidden("::".join(parts[2:4]))
    ):
        raise SourceError(f"the graph calls {name}, which does more than compute", location=location, hint=HINT)


def _is_expression(text: str) -> bool:
    """Returns True if a text is arithmetic on sizes.

    An example is ``Mul(Integer(2), Symbol('s0', integer=True))``. The check covers calls only, not the size of an
    expression or its running time.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, MemoryError, RecursionError):  # Python raises the last two for deeply nested brackets
        return False
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return all(_is_arithmetic(node, called) for node in ast.walk(tree))


def _is_arithmetic(node: ast.AST, called: set[int]) -> bool:
    match node:
        case ast.Call(func=function):
            return isinstance(function, ast.Name | ast.Attribute)
        case ast.Name(id=name):
            return (_FUNCTION if id(node) in called else _VALUE).fullmatch(name) is not None
        case ast.Attribute(attr=name):
            return _METHOD.fullmatch(name) is not None and id(node) in called
        case ast.Constant(value=str() as word):
            return _WORD.fullmatch(word) is not None
        case ast.Constant(value=value):
            return value is None or isinstance(value, int | float)
    return isinstance(node, _SYNTAX)
