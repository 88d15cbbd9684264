"""Reading YAML that people wrote: plain values, every key once, and aliases that cannot grow without limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from clustersim.core.errors import needs
from clustersim.core.texts import Raised, Table, beyond_parser, check, refuse_twice, shown
from clustersim.core.units import format_bytes

LARGEST_YAML = 2**20
"""Largest YAML text [bytes]: its parser takes a second for so much."""
ALIASED = 2000
"""Values that all aliases of a YAML text stand for, at most: of an alias of aliases a few lines make gigabytes."""


def yaml_table(text: str, where: str, error: Raised) -> Table:
    """The mapping of a YAML text of plain values, every key once, without tags; aliases and merge keys (``<<``) stand
    for at most :data:`ALIASED` values together. Raises ``error``."""
    try:
        import yaml
    except ImportError:
        raise error(needs(f"{where}: YAML", "exchange")) from None
    if len(text) > LARGEST_YAML:
        raise error(f"{where}: {format_bytes(len(text))} are more than the {format_bytes(LARGEST_YAML)} of YAML read")

    try:
        table = yaml.load(text, _plain_loader(where, error))
    except yaml.YAMLError as wrong:
        mark = getattr(wrong, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark else ""
        problem = getattr(wrong, "problem", None) or wrong
        raise error(f"{where}: is not YAML of plain values: {problem}{line}") from None
    except (ValueError, RecursionError) as wrong:
        raise error(f"{where}: is not YAML: {beyond_parser(wrong)}") from None
    if not isinstance(table, dict):
        raise error(f"{where}: holds {shown(table)}, not keys with values")
    check(table, where, error)
    return {key: _unshared(value) for key, value in table.items()}


def _unshared(value: Any) -> Any:
    """A copy in which no two places hold one table, as aliases have it."""
    if isinstance(value, dict):
        return {key: _unshared(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_unshared(inner) for inner in value]
    return value


def _count(node: Any) -> int:
    """Values of a YAML node that is whole, itself among them; one more than :data:`ALIASED` where there are more."""
    total = 0
    waiting = [node]
    while waiting and total <= ALIASED:
        node = waiting.pop()
        total += 1
        for inner in node.value if isinstance(node.value, list) else ():
            waiting += inner if isinstance(inner, tuple) else (inner,)
    return total


def _plain_loader(source: str, error: Raised) -> Any:
    import yaml

    class Plain(yaml.SafeLoader):  # type: ignore[misc]
        """PyYAML's safe loader, which refuses repeated keys and aliases that grow without limit."""

        aliased = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            """A node; an alias of nothing above it, inside itself or one too many raises."""
            if self.check_event(yaml.AliasEvent):
                event = self.peek_event()
                line = event.start_mark.line + 1
                node = self.anchors.get(event.anchor)
                if node is None or node.end_mark is None:
                    why = "inside itself" if node is not None else "of nothing above it"
                    raise error(f"{source}: line {line} holds an alias {why}; write its value")
                self.aliased += _count(node)
                if self.aliased > ALIASED:
                    raise error(f"{source}: line {line}: aliases stand for more than {ALIASED:,} values; write them")
            return super().compose_node(parent, index)

        def compose_mapping_node(self, anchor: Any) -> Any:
            """A mapping without the nulls that a later value of their key overrules; a key twice raises."""
            node = super().compose_mapping_node(anchor)  # before keys of others are merged into it
            later: set[str] = set()
            pairs = []
            for key, value in reversed(node.value):  # null says nothing where the key is there again
                if value.tag != "tag:yaml.org,2002:null" or str(key.value) not in later:
                    pairs.append((key, value))
                later.add(str(key.value))
            node.value = pairs[::-1]
            refuse_twice([str(key.value) for key, _ in node.value], source, error)
            return node

        def flatten_mapping(self, node: Any) -> None:
            """Merge what ``<<`` brings."""
            node.value = _merged(node, self.flatten_mapping)

    return Plain


def _merged(node: Any, flatten: Callable[[Any], None]) -> list[tuple[Any, Any]]:
    """Keys of a YAML mapping with those that ``<<`` brings: its own count, then those of the first mapping that has one
    (yaml.org/type/merge). PyYAML 6.0.3 keeps to that, and 6.0.4 takes the last one's where keys are no single letters.

    flatten : what does the same for a mapping that is brought.
    """
    import yaml

    own_pairs = []
    brought: dict[str, tuple[Any, Any]] = {}
    for key, value in node.value:
        if key.tag != "tag:yaml.org,2002:merge":
            if key.tag == "tag:yaml.org,2002:value":  # "=" is a key like others
                key.tag = "tag:yaml.org,2002:str"
            own_pairs.append((key, value))
            continue
        for mapping in value.value if isinstance(value, yaml.SequenceNode) else [value]:
            if not isinstance(mapping, yaml.MappingNode):
                problem = f"<< brings a {mapping.id}, and not a mapping or a list of mappings"
                raise yaml.constructor.ConstructorError(None, None, problem, mapping.start_mark)
            flatten(mapping)
            for pair in mapping.value:
                brought.setdefault(str(pair[0].value), pair)
    own_names = {str(key.value) for key, _ in own_pairs}
    return [pair for name, pair in brought.items() if name not in own_names] + own_pairs
