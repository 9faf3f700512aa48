"""Where `$ref` leads: locations, `$id`, `$anchor` and dynamic anchors of one document. Nothing is fetched."""

from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from jaxkv.grammar.errors import InvalidSchema, UnsupportedSchema

_NOT_SCHEMAS = frozenset({"enum", "const", "default", "examples", "example", "required"})


def is_old(draft: str) -> bool:
    """Whether nothing beside a `$ref` counts."""
    return any(name in draft for name in ("draft-03", "draft-04", "draft-06", "draft-07"))


class Document:
    """An index of a schema document.

    Args:
        root: the schema; every object in it must be an object of its own.
        draft: its `$schema`; "" is the newest.
    """

    def __init__(self, root: Any, draft: str = "") -> None:
        self.id_keyword = "id" if any(name in draft for name in ("draft-03", "draft-04")) else "$id"
        self.lonely_references = is_old(draft)
        self.base: dict[int, str] = {}
        self.path: dict[int, str] = {}
        self.resources: dict[str, Any] = {"": root}
        self.anchors: dict[tuple[str, str], Any] = {}
        self.dynamic: dict[str, list[tuple[str, Any]]] = {}
        self._walk(root, "", "#", None)

    def _walk(self, node: Any, base: str, path: str, parent_key: str | None) -> None:
        if isinstance(node, list):
            for index, item in enumerate(node):
                self._walk(item, base, f"{path}/{index}", None)
        if not isinstance(node, dict):
            return
        names_only = parent_key in (
            "properties",
            "patternProperties",
            "$defs",
            "definitions",
            "dependentSchemas",
            "dependencies",
        )
        if not names_only:
            base = self._identify(node, base)
        self.base[id(node)] = base
        self.path[id(node)] = path
        for key, value in node.items():
            if names_only or key not in _NOT_SCHEMAS:
                escaped = key.replace("~", "~0").replace("/", "~1")
                self._walk(value, base, f"{path}/{escaped}", None if names_only else key)

    def _identify(self, node: dict[str, Any], base: str) -> str:
        if self.lonely_references and "$ref" in node:
            return base
        own = node.get(self.id_keyword)
        if isinstance(own, str) and own:
            target, fragment = urldefrag(urljoin(base, own))
            if fragment and target == base:
                self.anchors.setdefault((base, fragment), node)  # draft 4 to 7: "$id": "#name"
            else:
                base = target
                self.resources.setdefault(base, node)
        for keyword in ("$anchor", "$dynamicAnchor"):
            name = node.get(keyword)
            if isinstance(name, str):
                self.anchors.setdefault((base, name), node)
                if keyword == "$dynamicAnchor":
                    self.dynamic.setdefault(name, []).append((base, node))
        return base

    def path_of(self, node: Any) -> str:
        """The JSON pointer of a schema object."""
        return self.path.get(id(node), "#")

    def resolve(self, reference: str, node: dict[str, Any], keyword: str = "$ref") -> Any:
        """The schema that a reference in `node` means.

        Raises:
            UnsupportedSchema: it lies outside the document.
            InvalidSchema: it leads nowhere.
        """
        base = self.base.get(id(node), "")  # "" of what is no schema by its place (an example that is referred to)
        target, fragment = urldefrag(urljoin(base, reference))
        if not reference.split("#")[0]:  # same document, also under a base that urljoin does not understand (urn:)
            target = base
        resource = self.resources.get(target)
        if resource is None:
            raise UnsupportedSchema(
                keyword, self.path_of(node), f"{reference!r} is not in the document, and nothing is fetched"
            )
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            found = self.anchors.get((target, fragment))
            if found is None:
                raise InvalidSchema(f"{keyword} {reference!r} at {self.path_of(node)} leads nowhere: no such anchor")
            return found
        return self._pointer(resource, fragment, reference, keyword, node)

    def _pointer(self, at: Any, pointer: str, reference: str, keyword: str, node: dict[str, Any]) -> Any:
        for part in pointer.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(at, dict) and part in at:
                at = at[part]
            elif isinstance(at, list) and part.isdigit() and int(part) < len(at):
                at = at[int(part)]
            else:
                raise InvalidSchema(f"{keyword} {reference!r} at {self.path_of(node)} leads nowhere")
        return at
