# SPDX-License-Identifier: Apache-2.0
"""A processor of diffusers that calls esa: its own code, with the attention call led to `attend`.

Projections, norms and rotary positions differ between models and change between releases of diffusers, and none of it
is esa's business. So the source of the processor's `__call__` is read, its calls of `dispatch_attention_fn` and
`scaled_dot_product_attention` are replaced by calls of two methods below, and the result is compiled as the `__call__`
of a new class. The class of diffusers is not touched, and the new function has the old one's parameters (diffusers
looks at them) and its module's names."""
from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from typing import Any

import torch

from .base import Processor

_METHODS = {"dispatch_attention_fn": "_dispatch", "scaled_dot_product_attention": "_sdpa"}


class Borrowed(Processor):
    """Base of the borrowed processors. What the original keeps in itself is found there."""

    def __getattr__(self, name: str) -> Any:
        if name == "original":                          # not there yet
            raise AttributeError(name)
        return getattr(self.original, name)

    def _dispatch(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                  attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
                  scale: float | None = None, enable_gqa: bool = False, **others: Any) -> torch.Tensor:
        """In place of diffusers' dispatcher: (B, N, H, D)."""
        if query.shape[1] != key.shape[1]:
            raise ValueError(
                f"{type(self.original).__name__} attends {key.shape[1]} keys with {query.shape[1]} queries: this is "
                "not self-attention, and esa.apply does not know this use of it")
        if dropout_p or is_causal or (scale is not None and abs(scale * query.shape[-1] ** 0.5 - 1) > 1e-6):
            raise ValueError(
                f"{type(self.original).__name__} asks for attention that is causal, scaled or with dropout: esa.apply "
                "computes plain attention")
        return self.attend(query, key, value, attn_mask)

    def _sdpa(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *arguments: Any,
              **keywords: Any) -> torch.Tensor:
        """In place of torch's attention: (B, H, N, D)."""
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        return self._dispatch(query, key, value, *arguments, **keywords).transpose(1, 2)


class _Redirect(ast.NodeTransformer):
    """Leads the attention calls to methods of the first parameter."""

    def __init__(self, owner: str) -> None:
        self.owner, self.found = owner, 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = getattr(node.func, "id", getattr(node.func, "attr", None))
        if name in _METHODS:
            self.found += 1
            node.func = ast.copy_location(
                ast.Attribute(ast.Name(self.owner, ast.Load()), _METHODS[name], ast.Load()), node.func)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node


@functools.cache
def borrow(original: type) -> type[Processor]:
    """The class that runs `original`'s code with esa's attention; a ValueError where that cannot be."""
    call: Any = original.__call__
    trouble = f"esa cannot lead the attention of {original.__name__} to itself"
    if issubclass(original, torch.nn.Module):
        raise ValueError(f"{trouble}: it has weights of its own (an IP-Adapter?); unload it, or remove esa")
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(call)))
    except (OSError, TypeError, SyntaxError) as error:
        raise ValueError(f"{trouble}: its source cannot be read ({error})") from error
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or call.__closure__ is not None:
        raise ValueError(f"{trouble}: its __call__ is not a plain method")
    redirect = _Redirect(function.args.args[0].arg)
    function.decorator_list, function.returns = [], None
    redirect.visit(function)
    if not redirect.found:
        raise ValueError(
            f"{trouble}: its __call__ calls neither dispatch_attention_fn nor scaled_dot_product_attention; give "
            "register_family a processor")
    ast.increment_lineno(tree, call.__code__.co_firstlineno - 1)
    names: dict[str, Any] = {}
    exec(compile(ast.fix_missing_locations(tree), call.__code__.co_filename, "exec"), call.__globals__, names)
    return type(f"Esa{original.__name__}", (Borrowed, ), {"__call__": names[function.name], "__module__": __name__})
