"""Codecs by name."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.weights.codec.codec import Codec
from penstock.weights.codec.delta import DeltaCodec
from penstock.weights.codec.full import FullCodec
from penstock.weights.codec.int8_delta import Int8DeltaCodec
from penstock.weights.config import CodecName

CODECS: Mapping[CodecName, Codec] = {"full": FullCodec(), "delta": DeltaCodec(), "int8_delta": Int8DeltaCodec()}
