"""Whether a schema that refers to itself has values that end: one that has none would be generated for ever."""

from typing import Any, Final

# Each pass finds the schemas whose values nest one reference deeper than those found before it.
_MAX_PASSES: Final = 64


def first_endless(schemas: dict[str, Any]) -> str | None:
    """The place of the outermost schema that no finite value satisfies (or of one that refers on through dozens of
    others), or None. `schemas`: each schema of a document by its place, checked by `runtime.json_schema`, outer ones
    before inner ones."""
    ending: set[str] = set()
    inside_out = list(reversed(schemas))
    for _ in range(_MAX_PASSES):
        before = len(ending)
        ending.update(place for place in inside_out if place not in ending and _ends(place, schemas[place], ending))
        if len(ending) == len(schemas):
            return None
        if len(ending) == before:
            break
    return next(place for place in schemas if place not in ending)


def _ends(place: str, schema: Any, ending: set[str]) -> bool:
    """Whether there is a finite value, given that those of `ending` have one."""
    if isinstance(schema, bool):
        return True
    if "$ref" in schema:
        return schema["$ref"] in ending
    for choice in ("anyOf", "oneOf", "allOf"):
        if choice in schema:
            return any(f"{place}/{choice}/{index}" in ending for index in range(len(schema[choice])))
    types = schema.get("type", [])
    types = types if isinstance(types, list) else [types]
    if "enum" in schema or "const" in schema or set(types) - {"object", "array"}:
        return True
    # Without a type the keywords tell which one is generated.
    as_object = "object" in types if types else bool({"required", "properties"} & set(schema))
    as_array = "array" in types if types else bool({"items", "prefixItems", "minItems"} & set(schema))
    if not as_object and not as_array:
        return True
    return (as_object and _object_ends(place, schema, ending)) or (as_array and _array_ends(place, schema, ending))


def _object_ends(place: str, schema: dict[str, Any], ending: set[str]) -> bool:
    names = (name.replace("~", "~0").replace("/", "~1") for name in schema.get("required", ()))
    return all(f"{place}/properties/{name}" in ending for name in names)


def _array_ends(place: str, schema: dict[str, Any], ending: set[str]) -> bool:
    least = schema.get("minItems", 0)
    if not isinstance(least, int) or least < 1:
        return True
    listed = len(schema.get("prefixItems", ()))
    heads = all(f"{place}/prefixItems/{index}" in ending for index in range(min(least, listed)))
    return heads and (least <= listed or "items" not in schema or f"{place}/items" in ending)
