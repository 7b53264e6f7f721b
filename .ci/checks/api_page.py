"""Makes docs/api.md of the services that callers use, as protos/ describes them; `--write` renews it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/api.md"
SERVICES = (
    "tandem.v1.InferenceService",
    "tandem.v1.ClusterService",
    "inference.GRPCInferenceService",
    "vllm.grpc.engine.VllmEngine",
)
"""Services that are described, with all messages that their methods take and give."""
CHILDREN = {
    "FileDescriptorProto": {"message_type": 4, "enum_type": 5, "service": 6},
    "DescriptorProto": {"field": 2, "nested_type": 3, "enum_type": 4},
    "EnumDescriptorProto": {"value": 2},
    "ServiceDescriptorProto": {"method": 2},
}
"""Fields of each kind of descriptor that hold named things, and their numbers in `SourceCodeInfo.Location.path`."""
SCALARS = {
    value.number: value.name.removeprefix("TYPE_").lower() for value in FieldDescriptorProto.Type.DESCRIPTOR.values
}
HEAD = """# API

<!-- made by .ci/checks/api_page.py -->

Every method, message and field that a router answers, by service, with what the protos say of each. `optional`: whether
it is set can be told from its value. `one of`: at most one field of this name is set. What requests, streams and errors
mean as a whole: [protocol.md](protocol.md); clients: [clients.md](clients.md). A running router tells the same:

```
grpcurl -plaintext 127.0.0.1:50051 describe tandem.v1.GenerateRequest
```
"""
FIELDS = "| field | no. | type | means |\n| --- | --- | --- | --- |\n"


class ApiPage:
    """The text of docs/api.md, of one set of files with their comments."""

    def __init__(self, files: FileDescriptorSet) -> None:
        self._pool = DescriptorPool()
        self._comments: dict[str, str] = {}
        self._described: set[str] = set()
        for file in files.file:
            self._pool.Add(file)
            self._comments |= _comments(file)

    def text(self) -> str:
        """Returns the page: each service, then its messages and enums, each below the first service that uses it."""
        parts = [HEAD]
        for name in SERVICES:
            parts += self._service(self._pool.FindServiceByName(name))
        return "".join(parts)

    def _service(self, service: ServiceDescriptor) -> Iterator[str]:
        rows = [
            f"| `{each.name}` | {_link(each.input_type)} | {'stream of ' * each.server_streaming}"
            f"{_link(each.output_type)} | {self._comment(each)} |\n"
            for each in service.methods
        ]
        yield f"\n## {service.full_name}\n\n{self._comment(service)}\n\n"
        yield f"| method | takes | gives | does |\n| --- | --- | --- | --- |\n{''.join(rows)}"
        for method in service.methods:
            yield from self._message(method.input_type)
            yield from self._message(method.output_type)

    def _message(self, message: Descriptor) -> Iterator[str]:
        """Yields the message, unless it was described before, then all that its fields hold."""
        if message.full_name in self._described:
            return
        self._described.add(message.full_name)
        rows = "".join(f"| {' | '.join(self._field(each))} |\n" for each in message.fields)
        yield self._section(message, f"{FIELDS}{rows}" if rows else "It has no fields.\n")
        for field in message.fields:
            held = field.message_type.fields_by_name["value"] if _is_map(field) else field
            if held.message_type is not None:
                yield from self._message(held.message_type)
            elif held.enum_type is not None:
                yield from self._enum(held.enum_type)

    def _enum(self, enum: EnumDescriptor) -> Iterator[str]:
        if enum.full_name not in self._described:
            self._described.add(enum.full_name)
            rows = "".join(
                f"| `{each.name}` | {each.number} | {self._comments[f'{enum.full_name}.{each.name}']} |\n"
                for each in enum.values
            )
            yield self._section(enum, f"| value | no. | means |\n| --- | --- | --- |\n{rows}")

    def _section(self, described: Descriptor | EnumDescriptor, table: str) -> str:
        comment = self._comment(described)
        return "\n\n".join(filter(None, (f"\n### {described.full_name}", comment, table)))

    def _field(self, field: FieldDescriptor) -> tuple[str, ...]:
        oneof = field.containing_oneof
        choice = f", one of `{oneof.name}`" if oneof is not None and not oneof.name.startswith("_") else ""
        kind = f"{_label(field)}{_type(field)}{choice}"
        return f"`{field.name}`", str(field.number), kind, self._comment(field)

    def _comment(self, described: Descriptor | EnumDescriptor | FieldDescriptor | ServiceDescriptor) -> str:
        return self._comments[described.full_name]


def read_protos() -> FileDescriptorSet:
    """Returns protos/ as it stands, with its comments. Raises CalledProcessError if buf refuses it."""
    command = (str(Path(sys.executable).with_name("buf")), "build", "protos", "-o", "-")
    built = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return FileDescriptorSet.FromString(built.stdout)


def main() -> int:
    """Returns 0 if the page is up to date."""
    page = ApiPage(read_protos()).text()
    if "--write" in sys.argv:
        PAGE.write_text(page)
    elif not PAGE.exists() or PAGE.read_text() != page:
        print("docs/api.md is stale; run python .ci/checks/api_page.py --write")
        return 1
    return 0


def _comments(file: FileDescriptorProto) -> dict[str, str]:
    """Returns the comment above each named thing of the file, on one line for a table; empty if there is none."""
    by_path = {tuple(each.path): each.leading_comments for each in file.source_code_info.location}

    def walk(parent: Message, name: str, path: tuple[int, ...]) -> Iterator[tuple[str, str]]:
        yield name, " ".join(by_path.get(path, "").split()).replace("|", "\\|")
        for children, number in CHILDREN.get(parent.DESCRIPTOR.name, {}).items():
            for index, child in enumerate(getattr(parent, children)):
                yield from walk(child, f"{name}.{child.name}", (*path, number, index))

    return dict(walk(file, file.package, ()))


def _label(field: FieldDescriptor) -> str:
    if field.is_repeated and not _is_map(field):
        return "repeated "
    oneof = field.containing_oneof
    return "optional " if oneof is not None and oneof.name.startswith("_") else ""


def _type(field: FieldDescriptor) -> str:
    if _is_map(field):
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        return f"map from {_type(key)} to {_type(value)}"
    if (held := field.message_type or field.enum_type) is not None:
        return _link(held)
    return SCALARS[field.type]


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _link(described: Descriptor | EnumDescriptor) -> str:
    return f"[{described.name}](#{described.full_name.replace('.', '').lower()})"


if __name__ == "__main__":
    sys.exit(main())
