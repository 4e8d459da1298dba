"""Parameter structs of the kernels: one list of members each, the mirror of csrc/cuda/params.cuh.

A struct is packed by `struct.Struct` from its members in order: eight-byte members first, so that C++ and Python agree
without padding. csrc/cuda/params.cuh asserts the size of each.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any


class ParamsLayout:
    """Names and types ("p" address, "q" int64, "i" int32, "f" float32) of one struct's members, in order."""

    def __init__(self, name: str, members: str) -> None:
        self.name = name
        self.names: list[str] = []
        codes = []
        for part in members.split():
            code, names = part.split(":")
            for member in names.split(","):
                self.names.append(member)
                codes.append({"p": "Q"}.get(code, code))
        if codes != sorted(codes, key=lambda c: c in "if"):
            raise AssertionError(f"{name}: eight-byte members come first")
        text = "<" + "".join(codes)
        if struct.calcsize(text) % 8:
            text += "4x"
        self.format = struct.Struct(text)
        self._defaults: dict[str, Any] = {n: 0.0 if c == "f" else 0 for n, c in zip(self.names, codes, strict=True)}

    @property
    def size(self) -> int:
        return self.format.size

    def offset(self, name: str) -> int:
        """Byte offset of an eight-byte member."""
        return 8 * self.names.index(name)

    def template(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """All members in order, unnamed ones 0: copy it, set what a call changes, and give it to `filled`."""
        unknown = values.keys() - self._defaults.keys()
        if unknown:
            raise KeyError(f"{self.name} has no {sorted(unknown)}")
        return {**self._defaults, **values}

    def known(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Those of values that are members."""
        return {name: values[name] for name in self.names if name in values}

    def filled(self, full: dict[str, Any]) -> bytes:
        """The struct from all its members in order."""
        return self.format.pack(*full.values())

    def pack(self, values: Mapping[str, Any]) -> bytes:
        """The struct as bytes; members that are not named are 0."""
        return self.filled(self.template(values))


SEQUENCES = """
p:q_lens,kv_lens,new_lens,cu_q,cu_k,page_table,bias,mask,alibi,block_mask,seed
q:bias_b,bias_h,bias_i,bias_j,mask_b,mask_h,mask_i,mask_j,block_b,block_h,block_i,block_j,alibi_b,alibi_h,page_row
"""
SIZES = """
i:batch,seqlen_q,seqlen_k,total_q,total_k,heads_q,heads_kv,window_left,window_right,new_tokens
i:block_rows,block_columns,page_size,dropout_threshold
f:scale,softcap,keep_scale
"""

FORWARD = ParamsLayout(
    "ForwardParams",
    "p:q,k,v,out,lse,stats,sinks,partial_out,partial_lse "
    "q:q_b,q_i,q_h,k_b,k_j,k_h,v_b,v_j,v_h,stats_l,sinks_h" + SEQUENCES + SIZES + "i:tiles,section,splits",
)
FORWARD_MAPS_SIZE, BACKWARD_MAPS_SIZE = 1024, 1088  # of ForwardMapsParams and BackwardMapsParams: see with_maps
BACKWARD_TILES_SIZE = 1152  # of BackwardTilesParams in backward_sm90_load.cuh
COMBINE = ParamsLayout(
    "CombineParams",
    "p:out,lse,stats,sinks,partial_out,partial_lse,q_lens,cu_q q:stats_l,sinks_h "
    "i:batch,seqlen_q,total_q,heads_q,splits",
)
APPEND = ParamsLayout(
    "AppendParams",
    "p:k,v,k_new,v_new,kv_lens,new_lens,page_table "
    "q:k_b,k_j,k_h,v_b,v_j,v_h,kn_b,kn_t,kn_h,vn_b,vn_t,vn_h,page_row "
    "i:batch,capacity,heads_kv,new_tokens,page_size",
)
BACKWARD = ParamsLayout(
    "BackwardParams",
    "p:q,k,v,dout,dk,dv,dq_sum,rows,dbias,order,ticket "
    "q:q_b,q_i,q_h,k_b,k_j,k_h,v_b,v_j,v_h,do_b,do_i,do_h,"
    "dk_b,dk_j,dk_h,dv_b,dv_j,dv_h,dbias_b,dbias_h,dbias_i,dbias_j,row_tiles"
    + SEQUENCES
    + SIZES
    + "i:tiles,key_tiles,section,rotate",
)
BACKWARD_TILES = ParamsLayout("BackwardTilesParams", "p:dq q:dq_b,dq_i,dq_h")  # what it has behind the maps
DELTA = ParamsLayout(
    "DeltaParams",
    "p:out,dout,lse,stats,dlse,rows,dq_sum,q_lens,cu_q "
    "q:out_b,out_i,out_h,do_b,do_i,do_h,dlse_b,dlse_h,dlse_i,stats_l,row_tiles "
    "i:batch,seqlen_q,total_q,heads_q,tiles",
)
QUERY_GRADIENT = ParamsLayout(
    "QueryGradientParams",
    "p:dq,dq_sum,q_lens,cu_q q:dq_b,dq_i,dq_h,row_tiles i:batch,seqlen_q,total_q,heads_q,tiles f:scale",
)
SINK_GRADIENT = ParamsLayout(
    "SinkGradientParams",
    "p:dsinks,sinks,rows,lse,q_lens,cu_q q:sinks_h,dsinks_h,row_tiles i:batch,seqlen_q,total_q,heads_q,tiles",
)
BIAS_GRADIENT = ParamsLayout(
    "BiasGradientParams",
    "p:q,k,v,dout,rows,dbias "
    "q:q_b,q_i,q_h,k_b,k_j,k_h,v_b,v_j,v_h,do_b,do_i,do_h,dbias_b,dbias_h,dbias_i,dbias_j,row_tiles"
    + SEQUENCES
    + SIZES
    + "i:tiles,size_b,size_h,size_i,size_j",
)
ALL = (FORWARD, COMBINE, APPEND, BACKWARD, DELTA, QUERY_GRADIENT, SINK_GRADIENT, BIAS_GRADIENT)


def with_maps(maps: Sequence[bytes], members: bytes, size: int) -> bytes:
    """A struct that starts with tensor maps of 128 bytes and is a multiple of 64 bytes long."""
    return b"".join((*maps, members)).ljust(size, b"\0")


def with_tiles(members: bytes, values: Mapping[str, Any]) -> bytes:
    """Members of BackwardTilesParams: those behind the maps, and its own."""
    return members.ljust(BACKWARD_MAPS_SIZE - 4 * 128, b"\0") + BACKWARD_TILES.pack(values)


def declaration(layout: ParamsLayout) -> str:
    """The C++ struct of a layout, as it must stand in csrc/cuda/params.cuh."""
    kinds = {"Q": "uint64_t", "q": "int64_t", "i": "int32_t", "f": "float"}
    codes = [c for c in layout.format.format if c in kinds]
    lines = [f"struct {layout.name} {{"]
    start = 0
    for end in range(1, len(codes) + 1):
        if end == len(codes) or codes[end] != codes[start] or end - start == 10:
            lines.append(f"    {kinds[codes[start]]} {', '.join(layout.names[start:end])};")
            start = end
    lines += ["};", f'static_assert(sizeof({layout.name}) == {layout.size}, "params.py and params.cuh differ");']
    return "\n".join(lines)
