"""Encode features as Feast stores them in Redis: keys, fields and values, byte for byte (checked by `make check-feast`).

key     serialised entity key, version 3, then the name of the project
hash    field: 4 bytes, murmur3 of "view:feature", little-endian  ->  value: a protobuf message `feast.types.Value`
        field: "_ts:view"                                         ->  event time: google.protobuf.Timestamp
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import mmh3
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

STRING, INT64 = 2, 4  # numbers in Feast's ValueType
Field = descriptor_pb2.FieldDescriptorProto
SCALARS = {  # type of a feature -> (field of Value, its protobuf type)
    "int64": (4, Field.TYPE_INT64),
    "double": (5, Field.TYPE_DOUBLE),
}
LISTS = {
    "string_list": (12, Field.TYPE_STRING),
    "int64_list": (14, Field.TYPE_INT64),
    "double_list": (15, Field.TYPE_DOUBLE),
    "float_list": (16, Field.TYPE_FLOAT),
}

Scalar = bytes | int | float
FeatureValue = Scalar | Sequence


def make_value_class() -> type[Message]:
    """Return a message class with the fields of Feast's `Value` that are used here."""
    file = descriptor_pb2.FileDescriptorProto(name="feast_value.proto", package="feast_layout", syntax="proto3")
    value = file.message_type.add(name="Value")
    value.oneof_decl.add(name="val")
    for name, (number, kind) in SCALARS.items():
        value.field.add(name=name, number=number, type=kind, label=Field.LABEL_OPTIONAL, oneof_index=0)
    for name, (number, kind) in LISTS.items():
        listed = file.message_type.add(name=name)
        listed.field.add(name="val", number=1, type=kind, label=Field.LABEL_REPEATED)
        of_list = {"type": Field.TYPE_MESSAGE, "type_name": f".feast_layout.{name}", "label": Field.LABEL_OPTIONAL}
        value.field.add(name=name, number=number, oneof_index=0, **of_list)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("feast_layout.Value"))


VALUE = make_value_class()


def make_entity_key(project: str, join_key: str, entity_id: int) -> bytes:
    """Return the Redis key of the hash of one entity with an int64 id."""
    name = join_key.encode()
    head = struct.pack("<III", 1, STRING, len(name))
    return head + name + struct.pack("<IIq", INT64, 8, entity_id) + project.encode()


def make_feature_field(view: str, feature: str) -> bytes:
    """Return the field of a feature in the hash of its entity."""
    return struct.pack("<I", mmh3.hash(f"{view}:{feature}", signed=False))


def make_time_field(view: str) -> bytes:
    """Return the field of a view's event time in the hash of its entity."""
    return f"_ts:{view}".encode()


def encode_time(time_ms: int) -> bytes:
    """Return an event time, unix milliseconds, as Feast stores it."""
    return Timestamp(seconds=time_ms // 1000, nanos=time_ms % 1000 * 1_000_000).SerializeToString(deterministic=True)


def encode_value(kind: str, value: FeatureValue) -> bytes:
    """Return a value as Feast stores it. kind: the feature's type, a key of SCALARS or LISTS"""
    message = VALUE()
    if kind in SCALARS:
        setattr(message, kind, value)
    else:
        listed = getattr(message, kind)
        listed.SetInParent()  # so that an empty list is not a missing value
        listed.val.extend(value)
    return message.SerializeToString(deterministic=True)


def decode_value(kind: str, stored: bytes | None) -> FeatureValue | None:
    """Return a feature's value; None if it is missing or of another type than `kind`.

    Raises google.protobuf.message.DecodeError for bytes that are not Feast's.
    """
    if not stored:
        return None
    message = VALUE.FromString(stored)
    if message.WhichOneof("val") != kind:
        return None
    return getattr(message, kind) if kind in SCALARS else list(getattr(message, kind).val)
