"""What is wrong with a request's bytes? The decoder that refuses by value instead of raising.

gRPC answers a raising decoder with INTERNAL and no detail. Ours returns the error, and the handler
turns it into a status before anything else happens. What protobuf's own parser hides (which string
is not UTF-8, a second member of a oneof) shows in a *lenient* twin of the message: strings are
bytes there, and no field excludes another.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import cast

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FileDescriptor
from google.protobuf.message import DecodeError, Message

from ripresa.cluster.gateway.status import RequestError
from ripresa.cluster.gateway.validation import check_request_id
from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.errors import ErrorCode, InvalidArgument, RipresaError

_FIELD = descriptor_pb2.FieldDescriptorProto


def request_decoder(
    message: type[Message], max_message_bytes: int
) -> Callable[[bytes], Message | RipresaError]:
    """A gRPC request deserializer whose result is the message, or what is wrong with the bytes."""

    descriptor = cast(Descriptor, message.DESCRIPTOR)

    def decode(raw: bytes) -> Message | RipresaError:
        if len(raw) > max_message_bytes:
            return RequestError(
                ErrorCode.RESOURCE_EXHAUSTED,
                "MESSAGE_TOO_LARGE",
                f"the request has {len(raw)} bytes, the server accepts {max_message_bytes} "
                "(gateway.max_message_bytes)",
                metadata={"max_message_bytes": str(max_message_bytes)},
            )
        try:
            request = message.FromString(raw)
        except DecodeError:
            return explain(descriptor, raw)
        return _bad_request_id(descriptor, request) or _two_members(descriptor, raw) or request

    return decode


def explain(descriptor: Descriptor, raw: bytes) -> InvalidArgument:
    """Name the string field that is not UTF-8, or say that the bytes are no such message."""
    try:
        lenient = _lenient_class(descriptor).FromString(raw)
    except DecodeError:
        return InvalidArgument(
            "request", f"the bytes are not a valid {descriptor.full_name} message"
        )
    path = _first_bad_string(descriptor, lenient)
    return InvalidArgument(path or "request", "the text is not valid UTF-8")


def _bad_request_id(descriptor: Descriptor, request: Message) -> InvalidArgument | None:
    """The refusal of a client's id, before any other answer could repeat the id."""
    field = descriptor.fields_by_name.get("options")
    if field is None or field.message_type is not pb.RequestOptions.DESCRIPTOR:
        return None
    options: pb.RequestOptions = getattr(request, field.name)
    try:
        check_request_id(options.request_id, "options.request_id")
    except InvalidArgument as refusal:
        return refusal
    return None


def _two_members(descriptor: Descriptor, raw: bytes) -> InvalidArgument | None:
    """The refusal of a message that sets two members of one oneof; a parser keeps the last."""
    if not _has_oneofs(descriptor):
        return None
    return _doubled(descriptor, _lenient_class(descriptor).FromString(raw), "")


def _doubled(descriptor: Descriptor, lenient: Message, prefix: str) -> InvalidArgument | None:
    for oneof in descriptor.oneofs:
        given = [f"`{field.name}`" for field in oneof.fields if lenient.HasField(field.name)]
        if len(given) > 1:
            named = f"give one of {' and '.join(given)}, not both"
            return InvalidArgument(f"{prefix}{oneof.name}", named)
    for field, value in lenient.ListFields():
        inner = descriptor.fields_by_name[field.name].message_type
        if inner is None or field.is_repeated or not _has_oneofs(inner):
            continue
        found = _doubled(inner, value, f"{prefix}{field.name}.")
        if found is not None:
            return found
    return None


@cache
def _has_oneofs(descriptor: Descriptor) -> bool:
    """Whether a oneof is in a message, or in one that it has once; no list of ours has any."""
    inner = (field.message_type for field in descriptor.fields if not field.is_repeated)
    return bool(descriptor.oneofs) or any(_has_oneofs(each) for each in inner if each is not None)


def _first_bad_string(descriptor: Descriptor, lenient: Message, prefix: str = "") -> str | None:
    for field, value in lenient.ListFields():
        original = descriptor.fields_by_name[field.name]
        repeated = field.is_repeated
        if original.message_type is not None and original.message_type.GetOptions().map_entry:
            continue  # map keys stay strings in the lenient form, so they were checked
        for index, item in enumerate(value if repeated else (value,)):
            path = f"{prefix}{field.name}[{index}]" if repeated else f"{prefix}{field.name}"
            if original.message_type is not None:
                found = _first_bad_string(original.message_type, item, path + ".")
                if found is not None:
                    return found
            elif original.type == original.TYPE_STRING:
                try:
                    item.decode("utf-8")
                except UnicodeDecodeError:
                    return path
    return None


@cache
def _lenient_class(descriptor: Descriptor) -> type[Message]:
    """The same message with `bytes` for `string` (map entries excepted) and no real oneof."""
    pool = descriptor_pool.DescriptorPool()
    for dependency in descriptor.file.dependencies:
        pool.Add(_file_proto(dependency))
    file = _file_proto(descriptor.file)
    for message in file.message_type:
        del message.oneof_decl[:]
        for field in message.field:
            if field.HasField("oneof_index"):
                field.proto3_optional = True  # keeps presence: a oneof of its own
                field.oneof_index = len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{field.name}")
            if field.type == _FIELD.TYPE_STRING:
                field.type = _FIELD.TYPE_BYTES
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(descriptor.full_name))


def _file_proto(file: FileDescriptor) -> descriptor_pb2.FileDescriptorProto:
    proto = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(proto)
    return proto
